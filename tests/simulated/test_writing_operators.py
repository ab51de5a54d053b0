"""Operators of the user that write to their operands, without a rule: what is written and returned is one device's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import dshard
from dshard import Mesh, NotationError, register_rule
from dshard.layout import parse_layout
from dshard.testing import distribute, simulated, whole

pytestmark = pytest.mark.filterwarnings("ignore:.*has no rule")


@torch.library.custom_op("writing::one", mutates_args={"x"})
def one(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("writing::second", mutates_args={"out"})
def second(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@torch.library.custom_op("writing::both", mutates_args={"a", "b"})
def both(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    b.mul_(2)
    return a + b


@torch.library.custom_op("writing::listed", mutates_args={"xs"})
def listed(factor: float, xs: list[Tensor]) -> None:
    for x in xs:
        x.mul_(factor)


@both.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


def with_views(a: Any, b: Any) -> list[Any]:
    views = [b[1:], b.view(-1)[:7]]
    second(a, b)
    return views


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "one": lambda a, b: one(a),
    "a view": lambda a, b: one(a[1:3]),
    "transposed": lambda a, b: one(a.t()),
    "the second": lambda a, b: second(a, b),
    "by name": lambda a, b: second(out=b, x=a),
    "both": lambda a, b: both(a, b),
    "with views": with_views,
    "a list": lambda a, b: listed(2.0, [a, b]),
    "a list of views": lambda a, b: listed(2.0, [a.t(), b[1:4]]),
    "a plain one": lambda a, b: both(a, torch.ones(5, 4)),
}
LAYOUTS = [("x:S(0) y:R", "x:S(1) y:S(0)"), ("x:R y:R", "x:R y:R"), ("x:P(sum) y:S(0)", "x:R y:P(sum)")]


@pytest.mark.parametrize(("name", "layouts"), list(product(CALLS, LAYOUTS)))
def test_what_an_operator_writes_and_returns_is_that_of_one_device(name: str, layouts: tuple[str, str]) -> None:
    values = [torch.arange(20.0).view(5, 4), torch.arange(20.0).view(5, 4).cos()]
    alone = [x.clone() for x in values]
    expected = CALLS[name](*alone)
    mesh = Mesh((2, 2), ("x", "y"))
    with simulated(mesh), dshard.implicit_replication():
        ours = [distribute(x, parse_layout(layout, mesh)) for x, layout in zip(values, layouts, strict=True)]
        result = CALLS[name](*ours)
        found = [whole(x) for x in (*ours, *([result] if isinstance(result, Tensor) else result or []))]
    assert (result is None) == (expected is None)
    wanted = [*alone, *([expected] if isinstance(expected, Tensor) else expected or [])]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("op", "rule"), [("one", "a b ->"), ("second", "a b, a b ->"), ("both", "a b, a b -> a b")])
def test_a_rule_of_an_operator_that_writes_is_refused(op: str, rule: str) -> None:
    with pytest.raises(NotationError, match=rf"writing::{op} writes to .*leave the rule out.*returns what it computes"):
        register_rule(f"writing::{op}", rule)


@pytest.mark.parametrize("value", [torch.tensor([7]), torch.tensor([[7.0]]), torch.tensor(7), 7])
@pytest.mark.parametrize("layout", ["x:R", "x:S(0)"])
def test_one_value_fills_under_a_mask(layout: str, value: Any) -> None:
    """In any dtype, and also where the mask itself is written, as one device takes it."""
    mesh, mask = Mesh((2,), ("x",)), torch.tensor([True, False, True])
    expected = torch.zeros(3, 2)
    expected[mask] = value
    with simulated(mesh), dshard.implicit_replication():
        x, where = (distribute(t, parse_layout(layout, mesh)) for t in (torch.zeros(3, 2), mask))
        x[where] = value
        where[where] = False
        assert whole(x).equal(expected)
        assert not whole(where).any()
