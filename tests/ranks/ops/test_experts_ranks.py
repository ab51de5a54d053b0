"""Experts on real ranks: the ragged form receives its closed form of bytes, and wrong values raise on all ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import dshard
from dshard import ExpertBody, Layout, Shard, StrategyError, init_device_mesh, trace
from dshard.comm import bind
from dshard.core.context import static_sizes
from dshard.ops.experts import token_route
from dshard.replay import Replay
from dshard.testing import RankPool, distribute, no_host_sync, whole
from dshard.testing.counter import count_traffic
from tests.helpers.expert_cases import BIASED, body_of, drawn, one_by_one, rounded_errors

pytestmark = pytest.mark.ranks
BODY = dshard.mlp_experts()


def received(index: Tensor, held: list[range], tokens: list[range], own: int, width: int) -> tuple[int, int, int]:
    """The bytes that rank `own` receives: tokens and weights in the forward pass, sums, and those of the backward pass.

    Rows: a token once for each rank that has one of its experts, with 12 bytes for each pair: a code, and a weight of
    fp64; a sum for each; and backward both ways again, with the 8 bytes of the gradient of each weight.
    """

    def sent(source: int, to: int) -> tuple[int, int]:
        there = (index[tokens[source].start : tokens[source].stop, :, None] == torch.tensor(list(held[to]))).any(-1)
        return int(there.any(-1).sum()), int(there.sum())

    others = [rank for rank in range(len(held)) if rank != own]
    arriving, leaving = [sent(rank, own) for rank in others], [sent(own, rank) for rank in others]
    rows, pairs = (sum(each) for each in zip(*arriving, strict=True))
    own_rows, own_pairs = (sum(each) for each in zip(*leaving, strict=True))
    there, back = rows * width + pairs * 12, own_rows * width
    return there, back, rows * width + own_rows * width + own_pairs * 8


def forms(seeds: range) -> list[str]:
    """The generated cases on one mesh axis in which this rank did not receive the closed form."""
    wrong = []
    for seed in seeds:
        case = drawn(seed)
        rank = torch.distributed.get_rank()
        mesh = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
        split = Layout(mesh, (Shard(0),))
        x, index, weight, *parameters = (t.flatten(0, -2) if i < 3 else t for i, t in enumerate(case.tensors))
        tensors = [x, index, weight, *parameters]
        laid = [distribute(t, split).requires_grad_(t.is_floating_point()) for t in tensors]
        grad = distribute(torch.ones_like(x), split)
        with count_traffic() as forward:
            out = dshard.experts(body_of(case.rule), *laid, rule=case.rule, loops="ragged")
        with count_traffic() as backward:
            out.backward(grad)
        leaves = tuple(t.clone().requires_grad_(t.is_floating_point()) for t in tensors)
        right = one_by_one(case.rule, leaves)
        right.backward(torch.ones_like(x))
        pairs = [(out.detach(), right.detach()), *((a.grad, b.grad) for a, b in zip(laid, leaves, strict=True))]
        values = all(torch.allclose(whole(a), b) for a, b in pairs if b is not None)
        held = [split.dim_range(0, parameters[0].shape[0], (r,)) for r in range(4)]
        tokens = [split.dim_range(0, len(x), (r,)) for r in range(4)]
        there, back, again = received(index, held, tokens, rank, x.shape[1] * 8)
        counted = (forward.nbytes - 3 * 16, backward.nbytes)  # two numbers of each other rank
        if counted != (there + back, again) or not values:
            wrong.append(f"{seed}: {counted}, not {(there + back, again)}; values {values}: {case}")
    return wrong


def test_the_ragged_form_receives_its_closed_form_of_bytes(ranks: RankPool) -> None:
    assert ranks.run(forms, range(12)) == [[]] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_ragged_form_receives_its_closed_form_in_generated_cases(ranks: RankPool, first: int) -> None:
    assert ranks.run(forms, range(first, first + 100), timeout=300) == [[]] * 4


def laid_out(dtype: torch.dtype = torch.float64, width: int = 4) -> list[Any]:
    """Operands on four ranks, each split along its first dim."""
    split = Layout(bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",))), (Shard(0),))
    torch.manual_seed(0)
    index = torch.rand(13, 5).topk(2).indices
    shapes = (13, width), (13, 2), (5, 16, width), (5, width, 16)
    x, weight, up, down = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return [distribute(t, split) for t in (x, index, weight, up, down)]


def wrong_index() -> list[str]:
    """What this rank raises where rank 2 has an index of no expert."""
    raised = []
    for loops in ("ragged", "expert"):
        x, index, *rest = laid_out()
        if torch.distributed.get_rank() == 2:
            index.to_local()[0, 0] = 7
        try:
            dshard.experts(BODY, x, index, *rest, loops=loops)
        except IndexError as error:
            raised.append(str(error))
    return raised


def test_an_index_of_no_expert_on_one_rank_raises_on_all(ranks: RankPool) -> None:
    assert ranks.run(wrong_index) == [["experts: index has an expert 7, but there are 5, from 0 to 4"] * 2] * 4


def compiled(dtypes: list[torch.dtype]) -> list[float]:
    """How far a compiled call is from an eager one, values and gradients."""
    found = []
    for dtype in dtypes:
        given = laid_out(dtype, 16)
        both = [[t.detach().requires_grad_(t.is_floating_point()) for t in given] for _ in range(2)]

        def run(x: Tensor, *rest: Tensor) -> Any:
            return dshard.experts(dshard.mlp_experts(), x, *rest)

        eager, graph = run(*both[0]), torch.compile(run, fullgraph=True, backend="aot_eager")(*both[1])
        for out in (eager, graph):
            out.sum().backward()
        pairs = [(eager.detach(), graph.detach())]
        pairs += [(a.grad, b.grad) for a, b in zip(*both, strict=True) if a.requires_grad]
        found += [float((whole(a) - whole(b)).abs().max() / whole(a).abs().max()) for a, b in pairs]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float64]])
def test_a_compiled_call_equals_an_eager_one(ranks: RankPool, dtypes: list[torch.dtype]) -> None:
    assert max(map(max, ranks.run(compiled, dtypes, timeout=120))) < 2e-5


def one_expert() -> list[float | None]:
    """The greatest gradient of each parameter of each expert, where the body leaves those without tokens out."""
    found = []
    for loops in ("ragged", "expert", "tokens"):
        x, index, weight, up, down = laid_out()
        bias, last = up.sum(2), down.sum(2)
        parameters = [t.detach().requires_grad_() for t in (up, bias, down, last)]
        out = dshard.experts(body_of(BIASED), x, index * 0, weight, *parameters, rule=BIASED, loops=loops)
        out.square().sum().backward()
        found += [None if p.grad is None else whole(p.grad)[1:].abs().max().item() for p in parameters]
    return found


def test_a_body_may_leave_out_experts_without_tokens(ranks: RankPool) -> None:
    assert ranks.run(one_expert) == [[0.0] * 12] * 4


def waits() -> list[object]:
    """How often the ragged form reads numbers on the host, and whether static forms do."""
    reads, found = [0], list[object]()

    def read(x: Tensor) -> object:
        reads[0] += 1
        return x.numpy().tolist()  # which is no operator

    def there_and_back(loops: str) -> None:
        given = [t.detach().requires_grad_(t.is_floating_point()) for t in laid_out(torch.float32, 16)]
        with no_host_sync():
            dshard.experts(BODY, *given, loops=loops).sum().backward()

    with patch.object(token_route, "numbers_of", read):
        there_and_back("ragged")
    with static_sizes():
        there_and_back("expert")
        there_and_back("tokens")
        try:
            there_and_back("ragged")
        except StrategyError as error:
            found.append("asks the host" in str(error))
    return [*reads, *found]


def test_the_ragged_form_asks_once_and_static_forms_never(ranks: RankPool) -> None:
    assert ranks.run(waits) == [[1, True]] * 4


def replayed() -> list[object]:
    """Of a replayed training step: how often it was replayed, and how far parameters are from a step by Python."""
    runs = []
    for by_replay in (True, False):
        x, index, _, *parameters = laid_out()
        leaves = [p.detach().requires_grad_() for p in parameters]

        def step(x: Tensor, index: Tensor, leaves: list[Tensor] = leaves) -> Tensor:
            loss: Tensor = dshard.experts(BODY, x, index, x[:, :2], *leaves).square().mean()
            loss.backward()
            with torch.no_grad():
                for leaf in leaves:
                    assert leaf.grad is not None
                    leaf -= 0.01 * leaf.grad
                    leaf.grad = None
            return loss.detach()

        run = dshard.replay(step) if by_replay else step
        for i in range(8):
            run(x / (4 + i), (index + i) % 5)
        runs.append((leaves, run))
    (mine, run), (right, _) = runs
    assert isinstance(run, Replay)
    far = max((whole(a.detach()) - whole(b.detach())).abs().max().item() for a, b in zip(mine, right, strict=True))
    return [run.replays, run.why_not, far < 1e-12]


def test_a_replayed_step_takes_static_forms(ranks: RankPool) -> None:
    assert ranks.run(replayed) == [[5, "", True]] * 4


def asked() -> list[int]:
    """How often the ragged form and the static ones send counts."""
    found = []
    for loops in ("ragged", "expert", "tokens"):
        given = laid_out()
        with trace() as sent:
            dshard.experts(ExpertBody(BODY), *given, loops=loops)
        found.append(sum(event.collective == "all_to_all" for event in sent.events))
    return found


def test_only_the_ragged_form_exchanges_counts(ranks: RankPool) -> None:
    assert ranks.run(asked) == [[3, 0, 0]] * 4


def rounded() -> list[bool]:
    """Whether bf16 is as exact on this mesh as on one device, which sums over ranks round once more."""
    mesh = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
    every = [rounded_errors(mesh, loops) for loops in ("tokens", "expert", "ragged", "split experts")]
    return [mine < min(2**-7, 1.25 * alone) for errors in every for mine, alone in errors]


def test_low_precision_is_as_exact_on_processes_as_on_one_device(ranks: RankPool) -> None:
    assert ranks.run(rounded) == [[True] * 20] * 4


def spread() -> list[object]:
    """How the tokens of this rank, and of all if ranks measure, were spread, and what no trace would tell."""
    found, given = list[object](), laid_out(torch.float32, 16)
    rank = torch.distributed.get_rank()
    if rank == 2:  # one rank alone may trace
        with no_host_sync(), trace() as own:
            dshard.experts(BODY, *given, loops="expert")
        found.append([own.experts[0].by_expert() == given[1].to_local().flatten().bincount(minlength=5).tolist()])
    else:
        dshard.experts(BODY, *given, loops="expert")
    with trace(measure=True) as sent:
        dshard.experts(BODY, *given, loops="ragged")
    (call,) = sent.experts
    assert {event.collective for event in sent.events} == {"all_to_all"}, "counts are summed beside the trace"
    return [*found, call.all_ranks, call.by_expert() == whole(given[1]).flatten().bincount(minlength=5).tolist()]


def test_a_trace_counts_the_tokens_of_its_rank_or_of_all_that_measure(ranks: RankPool) -> None:
    others = [True, True]
    assert ranks.run(spread) == [others, others, [[True], *others], others]


def by_host(index: Tensor, held: list[range], own: int) -> list[tuple[int, int]]:
    """What rank `own` receives on a mesh (hosts=2, ranks=2): ranks and bytes of each exchange forward.

    A token goes once to the other host that has one of its experts, to the rank with its own rank's number there.
    """
    width, pair, counts = 4 * 4, 8, 16
    tokens = [index.tensor_split(4)[rank] for rank in range(4)]

    def needs(rows: Tensor, *ranks: int) -> tuple[Tensor, int]:
        there = (rows[:, :, None] == torch.tensor([e for rank in ranks for e in held[rank]])).any(-1)
        return there.any(-1), int(there.sum())

    host, number = divmod(own, 2)
    other, beside = (1 - host) * 2 + number, host * 2 + 1 - number
    hosts, other_host = (host * 2, host * 2 + 1), ((1 - host) * 2, (1 - host) * 2 + 1)
    arrived, arrived_pairs = needs(tokens[other], *hosts)
    left, _ = needs(tokens[own], *other_host)
    lanes = {n: torch.cat([tokens[host * 2 + n], tokens[(1 - host) * 2 + n]]) for n in (0, 1)}
    for n in (0, 1):
        lanes[n] = lanes[n][needs(lanes[n], *hosts)[0]]
    inside, inside_pairs = needs(lanes[1 - number], own)
    outside, _ = needs(lanes[number], beside)
    return [
        (2, counts),
        (2, int(arrived.sum()) * width + arrived_pairs * pair),
        (2, counts),
        (2, int(inside.sum()) * width + inside_pairs * pair),
        (2, int(outside.sum()) * width),
        (2, int(left.sum()) * width),
    ]


def hops() -> list[object]:
    """The exchanges of a call with a hop, those of the closed form, and how far the result is from one device."""
    mesh = bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks")))
    split = Layout(mesh, (Shard(0), Shard(0)))
    torch.manual_seed(0)
    index = torch.rand(64, 8).topk(3).indices
    tensors = [torch.randn(64, 4), index, torch.randn(64, 3), torch.randn(8, 6, 4), torch.randn(8, 4, 6)]
    laid = [distribute(t, split) for t in tensors]
    with count_traffic() as sent:
        out = dshard.experts(BODY, *laid, loops="hop x ragged")
    held = [split.dim_range(0, 8, (rank // 2, rank % 2)) for rank in range(4)]
    far = (whole(out) - dshard.experts(BODY, *tensors)).abs().max().item()
    counted = [(each.ranks, each.nbytes) for each in sent.collectives]
    return [counted, by_host(index, held, torch.distributed.get_rank()), far]


def test_a_hop_sends_a_token_once_to_each_host(ranks: RankPool) -> None:
    for counted, expected, far in ranks.run(hops):
        assert counted == expected
        assert isinstance(far, float)
        assert far < 1e-5
