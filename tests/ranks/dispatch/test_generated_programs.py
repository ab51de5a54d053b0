"""Generated programs on real ranks: the values and gradients of one device, or a documented refusal."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.generated_programs import (
    Program,
    generated,
    is_documented,
    one_device,
    outcomes,
    run,
    shorter,
    simulated_outcome,
)

from dshard.testing import RankPool

RIGHT = {"equal", "raised"}
ONCE_WRONG = {
    "a tensor written unseen between its uses": Program((2, 2), (
        "t1 = leaf((5, 4), 'x:S(0) y:S(1)', 876)",
        "t2 = t1 * 2",
        "t2.register_hook(lambda g: g * 3)",
        "t3 = t2 * 0.5",
        "with no_grad(): t2[1:].div_(1.5)",
        "t4 = t2.cumsum(0)",
        "loss = t3.sum().sin() + t4.square().sum()",
        "g_t1, g_t2 = grad(loss, [t1, t2], create_graph=True)",
        "(g_t1 * g_t2).sum().backward()",
    ), runs=3),
    "a retained gradient of a tensor written unseen": Program((4,), (
        "t1 = leaf((3, 4), 'x:S(1)', 877)",
        "t2 = t1 * 2",
        "t2.retain_grad()",
        "loss = (t2 * 0.5).sum().sin()",
        "t2.detach().t().zero_()",
        "loss = loss + (t2 + t1).square().sum()",
        "loss.backward()",
        "g_t2 = t2.grad",
    ), runs=2),
    "a tensor written seen and unseen": Program((2, 1, 2), (
        "t1 = leaf((6, 3), 'x:P(sum) y:R z:S(0)', 878)",
        "t2 = t1 * 2",
        "t3 = t2 * 0.5",
        "with no_grad(): t2.add_(1)",
        "t2.mul_(3)",
        "t4 = t2 + 1",
        "with no_grad(): t2[0] = 0.5",
        "loss = t3.sum().sin() + t4.square().sum() + t2.sum().cos()",
        "g_t1, g_t2, g_t3 = grad(loss, [t1, t2, t3], create_graph=True, allow_unused=True)",
        "(g_t1 * g_t1).sum().backward()",
    ), runs=2),
    "a table without features on some ranks": Program((2, 2), (
        "t1 = leaf((5, 1), 'x:S(1) y:S(0)', 447)",
        "loss = F.embedding(index([2, 3, 2, 1], 'x:R y:R'), t1).exp().sum()",
        "g_t1, = grad(loss, [t1], create_graph=True)",
        "g_t1.tanh().sum().backward()",
    ), runs=2),
    "the gradient of a vector without elements": Program((4,), (
        "t1 = leaf((0, 1), 'x:S(0)', 18)",
        "t2 = t1.mT[0]",
        "g_t1, g_t2 = grad(torch.cat([t2, t2]).sum(), [t1, t2], create_graph=True)",
    )),
    "a write of one tensor without elements to another": Program((4,), (
        "t1 = leaf((3, 4, 0), 'x:S(0)', 18)",
        "t2 = t1.index_select(-2, index([1, 2], 'x:R')) * 1",
        "t2[None].index_add_(-2, index([1, 1], 'x:R'), t2[None].index_select(-2, index([1, 1], 'x:R')))",
        "loss = t2.sum()",
        "loss.backward()",
    )),
    "a hook on a saved result": Program((2, 2), (
        "t1 = leaf((4,), 'x:R y:S(0)', 33)",
        "t2 = (t1 * 0.5).exp()",
        "t2.register_hook(lambda g: g * 2)",
        "g, = grad(t2.sum().sin(), [t1], create_graph=True)",
        "g.sin().sum().backward()",
    )),
    "a hook given zeros without memory": Program((4,), (
        "t1 = leaf((1, 5), 'x:P(sum)', 851)",
        "t1.register_hook(lambda g: g * 3)",
        "t2 = (torch.zeros_like(t1) + t1).abs()",
        "g, = grad(t2, [t1], t2.detach(), create_graph=True)",
        "h, = grad(g.sum(), [t1])",
    )),
    "a cut operand overwritten": Program((2, 1, 2), (
        "t1 = leaf((2, 4), 'x:S(1) y:R z:S(0)', 131)",
        "t2 = leaf((4, 7), 'x:S(0) y:S(0) z:S(1)', 721, False)",
        "t3 = t1 @ t2",
        "t2.neg_()",
        "t3.sum().backward()",
    )),
    "an expanded tensor written by views": Program((2, 2), (
        "t1 = leaf((6, 7), 'x:R y:S(0)', 886)",
        "t2 = t1 * 2",
        "t3 = t2 * t2",
        "with no_grad(): t2.expand(2, -1, -1).diagonal().T.tril_()",
        "t3.sum().backward()",
    )),
    "a saved result asked for": Program((2, 2), (
        "t1 = leaf((4,), 'x:R y:S(0)', 33)",
        "t2 = (t1 * 0.5).exp()",
        "g1, g2 = grad(t2.sum().sin(), [t1, t2], create_graph=True)",
        "h2, = grad(g1.sin().sum() + g2.sum(), [t2])",
    )),
    "second order": Program((4,), (
        "t1 = leaf((5,), 'x:S(0)', 743)",
        "g, = grad((t1 * t1).sum().sin(), [t1], create_graph=True)",
        "(g * g).sum().backward()",
    ), runs=2),
    "a row written": Program((2, 1, 2), (
        "t1 = leaf((5, 5), 'x:R y:R z:R', 404)",
        "t2 = t1 * 1",
        "t2[1].masked_fill_(t2[1] > 0, 0.3)",
        "g, = grad(t2.sum(), [t1], create_graph=True)",
    )),
    "a transpose written": Program((4,), (
        "t1 = leaf((4, 1), 'x:S(0)', 483)",
        "t2 = t1.sin()",
        "t2.mT.transpose(1, 1).T[..., 0] = 0.7",
        "t2.sum().sin().backward()",
    )),
    "memory in another order": Program((4,), (
        "t1 = leaf((5, 4, 3), 'x:R', 689)",
        "t2 = t1.amax(2)",
        "t2.select(-1, 2).narrow(-1, 1, 4).masked_fill_(t2.select(-1, 2).narrow(-1, 1, 4) > 0.2, 0.3)",
    )),
    "all of a dim": Program((4,), (
        "t1 = leaf((5, 3), 'x:S(0)', 1)",
        "t2 = t1 * 1",
        "t2.mT.narrow(1, 0, 5).mul_(2)",
        "t2.sum().backward()",
    )),
    "an expanded gradient of a view": Program((4,), (
        "t1 = leaf((4,), 'x:R', 878)",
        "loss = t1.t().sum()",
        "loss.backward()",
        "loss.backward()",
    )),
    "a partial operand written": Program((2, 1, 2), (
        "t1 = leaf((7, 7), 'x:R y:R z:P(sum)', 952)",
        "t2 = t1 * 1",
        "t3 = F.softplus(t2)",
        "t2.square_()",
        "t3.sum().backward()",
    )),
    "a gradient in flight": Program((2, 2), (
        "t1 = leaf((1, 0, 3), 'x:R y:S(2)', 261)",
        "t2 = t1.cumsum(-1)",
        "grads = grad(t2, [t1], t2, create_graph=True)",
        "g = grads[0]",
        "second = (g * g).sum()",
        "grads = grad(second, [t1], allow_unused=True)",
    )),
    "an expanded partial tensor": Program((4,), (
        "t2 = leaf((1,), 'x:P(sum)', 449, False)",
        "t2.expand(2, -1).zero_()",
    )),
    "a number copied": Program((4,), (
        "t2 = leaf((6, 3), 'x:P(sum)', 350, False)",
        "t2.copy_(2)",
    )),
    "overwritten": Program((4,), (
        "t1 = leaf((5, 5), 'x:S(1)', 1)",
        "t2 = t1.sigmoid()",
        "t2.mul_(3)",
        "t2.sum().backward()",
    ), runs=2),
    "saved, then written by views": Program((4,), (
        "t1 = leaf((4, 3), 'x:S(1)', 475)",
        "t2 = t1.triu(1)",
        "t4 = F.mse_loss(t2, t2.expand_as(t2))",
        "t2.mT.reshape([3, 4]).mT.addcmul_(t2, t2)",
        "loss = (t2 * t2).sum() + (t4 * t4).sum()",
        "loss.backward()",
    ), runs=2),
    "written by views of one column": Program((4,), (
        "t1 = leaf((4, 4), 'x:S(1)', 476, False)",
        "t1.mT.reshape([4, 4]).mT.addcmul_(t1, t1)",
    ), runs=2),
    "a product by blocks of one column": Program((2, 1, 2), (
        "t1 = leaf((3, 4), 'x:S(1) y:S(1) z:S(1); 1:x,z,y', 491)",
        "t2 = leaf((4, 1), 'x:S(1) y:R z:R', 942)",
        "t3 = t1 @ t2",
        "t3.sin().sum().backward()",
    ), runs=2),
    "a view of an expanded tensor that is sent": Program((2, 2), (
        "t1 = leaf((1, 4), 'x:R y:S(0)', 433, False)",
        "t2 = t1.expand(2, -1, -1).view([2, 4])",
        "t2[-1:] = 1.5",
    ), runs=2),
    "part of an expanded tensor": Program((2, 2), (
        "t1 = leaf((4, 1), 'x:R y:S(0)', 433, False)",
        "t2 = t1.expand(-1, 3)",
        "t2[1:, 1:2].mul_(3)",
        "t2.chunk(2)[0].mT[-1].zero_()",
    ), runs=2),
    "one of several views, written and detached": Program((2, 1, 2), (
        "t1 = leaf((7, 6, 3), 'x:R y:R z:R', 398)",
        "t2 = t1 * 1",
        "t3 = t2.chunk(1, -1)[0]",
        "with no_grad(): t3.cumsum_(-1)",
        "t4 = t3.detach()",
    )),
    "saved, then written by a view in a first call": Program((2, 2), (
        "t1 = leaf((6, 11), 'x:R y:R', 830)",
        "t2 = t1.sigmoid()",
        "t2.mT.mul_(3)",
        "t2.sum().backward()",
    ), runs=2),
    "a conjugate written": Program((2, 2), (
        "t1 = leaf((5, 3), 'x:S(0) y:P(sum)', 865)",
        "t2 = torch.complex(t1, t1 * 2)",
        "t3 = t2.conj()",
        "t3[0].mul_(2j)",
        "t2.mul_(3)",
        "t4 = t3 * 1",
        "t2.real.sin().sum().backward()",
    ), runs=3),
    "a view of a completed sum in another order": Program((4,), (
        "t1 = leaf((6, 4), 'x:R', 823)",
        "t2 = leaf((6, 4), 'x:P(sum)', 82)",
        "t3 = torch.maximum(t1.mT, t1.mT * 2)",
        "t3.mT.flatten(0, 1).mul_(2)",
        "t4 = torch.maximum(t2.mT, t2.mT * 2)",
        "t4.mT.flatten(0, 1).mul_(3)",
        "(t3 * t4).sum().backward()",
    ), runs=2),
    "dropout that drops nothing, written": Program((2, 2), (
        "t1 = leaf((3, 2), 'x:S(0) y:P(sum)', 823, False)",
        "F.dropout(t1, 0.5, False).mul_(2)",
    )),
    "a convolution without output channels": Program((2, 2), (
        "t1 = leaf((2, 3, 4), 'x:S(0) y:S(1)', 5, False)",
        "t2 = leaf((0, 3, 2), 'x:R y:S(1)', 6, False)",
        "t3 = F.conv1d(t1, t2)",
    )),
    "one complex number with a stride": Program((4,), (
        "t1 = leaf((1, 2, 2), 'x:P(sum)', 156, False)",
        "t2 = moved(torch.view_as_complex(t1)[..., ::2], 'x:R')",
    )),
}  # fmt: skip
"""Programs of a few lines that gave something else than one device, or raised on some ranks alone."""
RAISED = {
    "an expanded tensor written by views",
    "a convolution without output channels",
    "a cut operand overwritten",
    "a partial operand written",
    "overwritten",
    "saved, then written by views",
    "saved, then written by a view in a first call",
}
"""Those that torch refuses on one device."""


def failures(pool: RankPool, seeds: range, cases: Counter[str], law: str) -> list[str]:
    """What is not as on one device, nor refused in words that the docs have."""
    found = []
    for seed, word, text in outcomes(pool, seeds):
        cases[f"{law}: {word}"] += 1
        if word not in RIGHT and not (word == "refused" and is_documented(text)):
            found.append(f"seed {seed}: {word}: {text}\n{generated(seed)}")
    return found


@pytest.mark.ranks
def test_programs_on_ranks_are_those_of_one_device(ranks: RankPool, cases_run: Counter[str]) -> None:
    found = failures(ranks, range(6), cases_run, "generated programs on real ranks")
    assert not found, "\n\n".join(found)


@pytest.mark.ranks
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_what_was_wrong_once(ranks: RankPool, every: int) -> None:
    names = [*ONCE_WRONG][::every]
    found = {
        name: word
        for name, (_, word, _) in zip(names, outcomes(ranks, [ONCE_WRONG[name] for name in names]), strict=True)
    }
    assert found == {name: "raised" if name in RAISED else "equal" for name in names}


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 20_000, 1000))
def test_many_programs_on_ranks(first: int, ranks: RankPool, cases_run: Counter[str]) -> None:
    found = failures(ranks, range(first, first + 1000), cases_run, "generated programs on real ranks")
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("seed", range(8))
def test_simulated_ranks_give_the_same(seed: int) -> None:
    word, text = simulated_outcome(generated(seed))
    assert word in RIGHT, f"{text}\n{generated(seed)}"


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_many_simulated_programs(first: int) -> None:
    for seed in range(first, first + 100):
        word, text = simulated_outcome(generated(seed))
        assert word in RIGHT or (word == "refused" and is_documented(text)), f"{text}\n{generated(seed)}"


def test_a_seed_is_a_program() -> None:
    assert all(generated(seed) == generated(seed) for seed in range(20))


def test_programs_have_writes_views_and_second_gradients() -> None:
    programs = [generated(seed) for seed in range(200)]
    text = ["\n".join(program.lines) for program in programs]
    assert sum("second" in each for each in text) > 60
    assert sum("_(" in each for each in text) > 60
    assert sum("no_grad" in each for each in text) > 5
    assert sum("checkpoint" in each for each in text) > 10
    assert sum(run(program.lines, one_device()).error is not None for program in programs) > 5


def test_a_program_shrinks_to_others_that_run_on_one_device() -> None:
    program = Program((4,), ("t1 = leaf((3,), 'x:S(0)', 1)", "t2 = t1 * 2", "t3 = t2.t().mul_(3)", "loss = t3.sum()"))
    found = [each.lines for each in shorter(program)]
    assert ("t1 = leaf((3,), 'x:S(0)', 1)", "t2 = t1 * 2") in found
    assert all(run(lines, one_device()).error is None for lines in found)
