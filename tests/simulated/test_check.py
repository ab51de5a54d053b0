"""check_rule passes what is right and finds what is wrong; user operators get rules in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dshard import Layout, Mesh, NotationError, Replicate, Shard, register_rule
from dshard.caches import clear_caches
from dshard.ops import distances
from dshard.ops.small_reductions import Statistic, reduced_statistic
from dshard.testing import RuleError, check_call, check_rule, distribute, simulated, whole


@torch.library.custom_op("checked::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor) -> Tensor:
    """A product of matrices, with a derivative of its own."""
    return x @ w * 2


@scaled.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("checked::scaled_backward", mutates_args=())
def scaled_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ w.t() * 2, x.t() @ grad * 2


@scaled_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.checked.scaled_backward(grad, *ctx.saved_tensors)


scaled.register_autograd(backward, setup_context=keep)


@torch.library.custom_op("checked::soft", mutates_args=())
def soft(x: Tensor) -> Tensor:
    """softmax of rows."""
    return x.softmax(-1)


@soft.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("checked::squares", mutates_args=())
def squares(x: Tensor, y: Tensor) -> Tensor:
    return (x * x).sum(-1) * y


@squares.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(y)


@torch.library.custom_op("checked::joined", mutates_args=())
def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, -1)


@joined.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, -1)


@pytest.fixture(autouse=True)
def right_rules() -> None:
    """Each test begins with rules that are right."""
    register_rule("checked::scaled", "m k, k n -> m n", linear=(0, 1))
    register_rule("checked::scaled_backward", "m n, m k, k n -> m k, k n", linear=(0,))
    register_rule("checked::soft", "b [h] -> b [h]")
    register_rule("checked::squares", "b h, b -> b", linear=(1,))


MATRICES = (torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64))
MATRIX = MATRICES[:1]
MESH = Mesh((2,), ("tp",))


@pytest.mark.parametrize("limit", [16, pytest.param(64, marks=pytest.mark.thorough)])
def test_a_right_rule_passes_forward_and_backward(limit: int) -> None:
    check_rule("checked::scaled", MATRICES, limit=limit)
    check_rule("checked::soft", MATRIX)
    check_rule("checked::squares", (MATRICES[0], torch.randn(5, dtype=torch.float64)), limit=limit)
    check_rule(torch.ops.checked.scaled.default, MATRICES, mesh_shapes=[(3,)])


def test_an_operator_of_any_number_of_tensors_has_a_rule() -> None:
    register_rule("checked::joined", "*b [] -> b []")

    for n in (1, 3):
        tensors = [torch.randn(5, 2 + i, dtype=torch.float64) for i in range(n)]
        check_rule("checked::joined", (tensors,), gradients=False, mesh_shapes=[(2,)])


def test_a_users_operator_runs_where_its_operands_lie() -> None:
    with simulated(MESH):
        x = distribute(MATRICES[0], Layout(MESH, (Shard(0),)))
        out = scaled(x, distribute(MATRICES[1], Layout(MESH, (Replicate(),))))

        assert str(out.layout) == "tp:S(0)"
        torch.testing.assert_close(whole(out), scaled(*MATRICES))


def test_a_wrong_rule_is_found_with_its_mesh_and_layouts() -> None:
    register_rule("checked::soft", "b h -> b h")

    with pytest.raises(RuleError) as caught:
        check_rule("checked::soft", MATRIX)

    text = str(caught.value)
    assert "the rule 'b h -> b h' of checked.soft.default is wrong on the mesh (d0=2), in the layouts" in text
    assert "d0:S(1) -> d0:S(1)" in text
    assert "Mismatched elements" in text


@pytest.mark.parametrize("linear", [(0,), (0, 1)])
def test_an_operand_that_is_not_linear_is_found(linear: tuple[int, ...]) -> None:
    register_rule("checked::squares", "b h, b -> b", linear=linear)

    with pytest.raises(RuleError, match=r"d0:P\((\w+)\), d0:R -> d0:P\(\1\)"):
        check_rule("checked::squares", (MATRICES[0], torch.randn(5, dtype=torch.float64)))


def test_a_wrong_reduction_is_found() -> None:
    register_rule("checked::scaled", "m k, k n -> m n", reduce="max", linear=(0, 1))

    with pytest.raises(RuleError, match=r"d0:S\(1\), d0:S\(0\) -> d0:P\(max\)"):
        check_rule("checked::scaled", MATRICES)


def test_a_wrong_backward_is_found() -> None:
    register_rule("checked::scaled_backward", "[m] n, m [k], [k] n -> m k, k n", reduce="avg")

    with pytest.raises(RuleError, match=r"of checked.scaled_backward.default is wrong"):
        check_rule("checked::scaled", MATRICES)


def test_a_wrong_row_is_found_though_it_is_never_the_cheapest() -> None:
    register_rule("checked::scaled", "m k, k n -> m n", reduce="product")
    replicated = Layout(MESH, (Replicate(),))

    check_call("checked::scaled", MATRICES, [replicated, replicated])
    with pytest.raises(RuleError, match="is wrong on the mesh"):
        check_rule("checked::scaled", MATRICES, placements=[Replicate()])


def test_a_wrong_alternative_is_found_though_it_is_never_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "aten::_cdist_forward"
    wrong = reduced_statistic(lambda call: Statistic(call.func, "max", torch.clone))
    clear_caches()
    monkeypatch.setitem(distances.RULES, name, replace(distances.RULES[name], alternatives=(wrong,)))

    with pytest.raises(RuleError, match=r"^the alternative 'small reductions' to the rule of aten._cdist_forward"):
        check_rule(torch.cdist, (MATRICES[0], MATRICES[0] + 1), gradients=False, mesh_shapes=[(2,)])
    clear_caches()


def test_an_error_of_the_distributed_call_is_reported() -> None:
    register_rule("checked::soft", "b h x -> b h x")

    with pytest.raises(RuleError, match=r"of \[d0:R\] on the mesh \(d0=2\) raised NotationError: the rule 'b h x"):
        check_call("checked::soft", MATRIX, [Layout(Mesh((2,)), (Replicate(),))])


def test_a_wrong_function_is_found() -> None:
    def leaky(x: Tensor) -> Tensor:
        """Sums what each rank holds, as if it were all."""
        return x.to_local().sum() if hasattr(x, "to_local") else x.sum()

    with pytest.raises(RuleError, match=r"leaky of \[d0:R\] on the mesh \(d0=2\): output 0: a \w+, not a DTensor"):
        check_rule(leaky, MATRIX)


def test_functions_operators_and_keyword_arguments() -> None:
    check_rule(F.gelu, MATRIX, mesh_shapes=[(2,)])
    check_rule(torch.softmax, (*MATRIX, {"dim": 1}), mesh_shapes=[(2,)])
    check_rule(torch.ops.aten.mm.default, MATRICES, mesh_shapes=[(2,)])
    check_rule(torch.relu, torch.randn(5), mesh_shapes=[(2,)])


@pytest.mark.parametrize("name", ["nosuch::thing", "checked", "checked::nothing"])
def test_an_unknown_operator_is_refused(name: str) -> None:
    with pytest.raises(NotationError, match=r"there is no operator .*: write namespace::name, such as 'mylib::fused'"):
        check_rule(name, MATRIX)


def test_an_ambiguous_operator_is_refused() -> None:
    with pytest.raises(NotationError, match=r"aten.add has the overloads .*: give one, such as aten.add\.\w+"):
        check_rule("aten::add", MATRIX)
