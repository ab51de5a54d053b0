"""Tensors of other classes beside distributed ones: plain data counts as such, own rules are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from dshard import (
    DTensor,
    Layout,
    LayoutError,
    Mesh,
    MixedError,
    Replicate,
    Shard,
    StrategyError,
    distribute_tensor,
    explain,
    implicit_replication,
    parallelize,
    plan_model,
    use_strategy,
)
from dshard.rules.attention_loops import ATTENTIONS
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2,), ("x",))


class Named(Tensor):
    """A class without rules of its own, such as one that has a name."""


class Image(Tensor):
    """A class whose function knows itself alone, as those of torchvision."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out.as_subclass(cls) if func is Tensor.detach else out


class Negated(Tensor):
    """A class that has a rule for a function with tensors of any class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__):
            return super().__torch_function__(func, types, args, kwargs or {})
        (other,) = (x for x in args if not isinstance(x, Negated))
        return -other


class Quantised(Tensor):
    """A weight in eight bits, which operators see through `__torch_dispatch__` alone."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[no-any-return, attr-defined]

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].numbers)
        raise NotImplementedError(f"eight bits have no {func}")


def with_rules(kind: str) -> Tensor:
    ones = torch.ones(4, 4)
    if kind == "Quantised":
        return Quantised(ones.to(torch.int8))
    if kind == "MaskedTensor":
        return torch.masked.masked_tensor(ones, ones > 0)  # type: ignore[no-any-return]
    if kind == "NestedTensor":
        return torch.nested.nested_tensor([ones, ones], layout=torch.jagged)
    return causal_lower_right(4, 4)


def distributed() -> DTensor:
    return distribute(torch.arange(16.0).view(4, 4), Layout(MESH, (Shard(0),)))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "product": lambda x, y: x @ y,
    "linear": F.linear,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "in place": lambda x, y: x.clone().add_(y),
    "operator": lambda x, y: torch.ops.aten.add.Tensor(x, y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
}
KINDS = ("Quantised", "MaskedTensor", "NestedTensor", "CausalBias")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_operands_with_own_rules_are_refused_by_name(kind: str, call: str) -> None:
    other = with_rules(kind)
    text = rf"\b{kind}\b.*has its own rules"
    with simulated(MESH):
        x = distributed()
        for _ in range(2):  # nothing of it is cached
            with pytest.raises(MixedError, match=text):
                CALLS[call](x, other)
        with implicit_replication(), pytest.raises(MixedError, match=text):
            CALLS[call](x, other)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_with_own_rules_are_not_laid_out(kind: str) -> None:
    other = with_rules(kind)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_buffer("table", other)
    for lay_out in (distribute_tensor, DTensor.from_local):
        with (
            simulated(MESH),
            pytest.raises(LayoutError, match=rf"\b{kind}\b.*has its own rules"),
        ):
            lay_out(other, MESH, [Shard(0)])
    for use in (parallelize, plan_model):
        with pytest.raises(LayoutError, match=rf"laying out 0.table of a .*\b{kind}\b"):
            use(model, MESH, "megatron", torch.ones(2, 4))


def test_quantised_weights_are_refused_by_the_names_of_parameter_and_class() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(with_rules("Quantised"), requires_grad=False)

    with pytest.raises(LayoutError, match=r"laying out 0.weight of a .*Quantised.*x.dequantize\(\)"):
        parallelize(model, MESH, "megatron", torch.ones(2, 4))


@pytest.mark.parametrize("kind", [Named, Image, Negated])
def test_other_classes_of_plain_data_are_plain_tensors(kind: type[Tensor]) -> None:
    numbers = torch.arange(16.0).view(4, 4)
    other, weight = numbers.as_subclass(kind), nn.Parameter(numbers.clone().as_subclass(kind))
    leaf = numbers.clone().as_subclass(kind).requires_grad_()
    with simulated(MESH):
        x = distributed()
        with pytest.raises(MixedError, match=r"a plain torch\.Tensor of shape"):
            x + other
        with implicit_replication():
            assert whole(x + other).equal(2 * numbers)
        for source in (0, None):
            laid = distribute_tensor(other, MESH, [Shard(0)], src_data_rank=source)
            assert whole(laid).equal(numbers)
        assert isinstance(distribute_tensor(weight, MESH, [Shard(0)]), nn.Parameter)
        DTensor.from_local(leaf, MESH, [Replicate()]).mul(3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.eq(3).all()


@pytest.mark.parametrize("kind", [Named, Image])
def test_models_may_have_parameters_and_inputs_of_other_classes(kind: type[Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(2, 4)
    expected = model(batch)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(kind))
    given = batch.as_subclass(kind)
    with simulated(MESH):
        parallelize(model, MESH, "megatron", given)
        out = model(given)
        torch.testing.assert_close(whole(out.detach()), expected.detach())


def test_a_class_has_its_own_rules_with_tensors_of_any_class() -> None:
    other = torch.ones(4, 4).as_subclass(Negated)
    with simulated(MESH):
        x = distributed()
        for product in (x * other, torch.mul(x, other)):
            assert whole(product).equal(-torch.arange(16.0).view(4, 4))


# -- masks of causal attention

BIASES = [causal_lower_right(3, 8), causal_upper_left(3, 8), causal_lower_right(7, 7), causal_upper_left(8, 5)]


def results(given: list[Any], bias: Any, grad: Any, **options: Any) -> list[Any]:
    out = F.scaled_dot_product_attention(*given, bias, **options)
    cotangent = distribute(grad, out.layout.cotangent()) if isinstance(out, DTensor) else grad
    return [out, *torch.autograd.grad(out, given, cotangent)]


@pytest.mark.parametrize(("loop", "bias"), one_way_each([*ATTENTIONS.rows, None], BIASES))
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("heads", [4, 2])
def test_causal_biases_are_masks_in_every_loop(bias: CausalBias, heads: int, dim: int, loop: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = bias.seq_len_q, bias.seq_len_kv
    given = [
        torch.randn(2, n, rows, 4, generator=generator) for n, rows in ((4, queries), (heads, keys), (heads, keys))
    ]
    grad, options = torch.randn(2, 4, queries, 4, generator=generator), {"enable_gqa": heads < 4}
    expected = results([x.clone().requires_grad_() for x in given], bias._materialize(), grad, **options)
    with simulated(MESH), use_strategy(attention=loop):
        laid = [distribute(x, Layout(MESH, (Shard(dim),))).requires_grad_() for x in given]
        try:
            found = results(laid, bias, grad, **options)
        except StrategyError:  # as for the mask that it stands for: on one axis, or with swapped halves
            causal = bias is not BIASES[0]
            mask = None if causal else distribute(bias._materialize(), Layout(MESH, (Replicate(),)))
            with pytest.raises(StrategyError):
                results(laid, mask, grad, is_causal=causal, **options)
            return
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine.detach()), right.detach())


def test_causal_biases_are_planned_without_data_and_follow_each_other() -> None:
    biases = BIASES[0], BIASES[1], BIASES[0]
    with simulated(MESH):
        q, k = (distribute(torch.randn(1, 2, rows, 4), Layout(MESH, (Shard(1),))) for rows in (3, 8))
        lower, upper, again = (whole(F.scaled_dot_product_attention(q, k, k, attn_mask=bias)) for bias in biases)
        with pytest.raises(ValueError, match="should not be used with causal=True"):
            F.scaled_dot_product_attention(q, k, k, BIASES[1], is_causal=True)
    assert lower.equal(again)
    assert not torch.allclose(lower, upper)
    x = distribute_tensor(torch.empty(1, 2, 8, 4, device="meta"), MESH, [Shard(2)])
    report = explain(lambda: F.scaled_dot_product_attention(x[:, :, :3], x, x, BIASES[0]))
    assert report.candidates


class Answers:
    """No tensor; it answers functions of torch by a method of the instance, as was once usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "an answer"


def test_an_operand_that_is_no_tensor_is_refused_in_torch_s_words() -> None:
    with simulated(MESH), pytest.raises(TypeError, match="must be Tensor, not Answers"):
        torch.add(distribute(torch.ones(4), Layout(MESH, [Shard(0)])), Answers())  # type: ignore[call-overload]


class Ragged(nn.Module):
    """A model of rows of several lengths, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(self.linear(x), offsets).sin().values()  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["data", "auto"])
def test_models_that_make_tensors_with_own_rules_are_not_planned(strategy: str) -> None:
    with pytest.raises(MixedError, match=r"\bNestedTensor\b.*has its own rules"):
        plan_model(Ragged(), MESH, strategy, torch.ones(6, 4), torch.tensor([0, 2, 6]))


class Propagated(nn.Module):
    """Linear features, multiplied by a matrix that it holds or is given."""

    def __init__(self, matrix: Tensor, held: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        if held == "buffer":
            self.register_buffer("matrix", matrix)
        else:
            self.matrix = matrix if held == "attribute" else None

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        matrix = self.matrix if matrix is None else matrix
        assert matrix is not None
        return matrix @ self.linear(x)


@pytest.mark.parametrize("held", ["input", "buffer", "attribute"])
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_tensors_of_models_are_refused_in_words(sparse: Callable[[Tensor], Tensor], held: str) -> None:
    matrix = sparse(torch.eye(4))
    model, args = Propagated(matrix, held), (torch.randn(4, 3), *[matrix] * (held == "input"))
    with simulated(MESH), pytest.raises(LayoutError, match=rf"is of layout {matrix.layout}: .* to_dense"):
        parallelize(model, MESH, "data", *args)(*args)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_examples_are_refused_by_name(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(n, 3) for n in (2, 4)], layout=layout)
    with pytest.raises(LayoutError, match=r"the input input is nested: .* by to_padded_tensor"):
        plan_model(nn.Linear(3, 2), MESH, "data", nested)
