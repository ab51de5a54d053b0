"""torch's experimental helpers by their names: functions on local tensors, shardings of operators as rows."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.tensor as their_tensor
import torch.distributed.tensor.experimental as theirs
from torch import Tensor

import dshard
from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard, trace
from dshard.dispatch import registry
from dshard.errors import LayoutError, ShapeError
from dshard.experimental import TensorLike, local_map, register_sharding
from dshard.testing import RankPool, check_rule, distribute, simulated, whole

LINE = Mesh((4,), ("tp",))
GRID = Mesh((2, 2), ("dp", "tp"))


@functools.cache
def mesh_of_four() -> Any:
    return dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


# -- local_map


def through(library: Any, mapped: Any) -> list[Any]:
    """A product of columns by rows on local parts, and its gradients."""
    mesh = mesh_of_four()
    w = library.distribute_tensor(torch.arange(24.0).view(3, 8), mesh, [library.Shard(1)]).requires_grad_()
    x = library.distribute_tensor(torch.arange(16.0).view(8, 2), mesh, [library.Shard(0)]).requires_grad_()
    product = mapped(
        lambda a, b, scale: (torch.mm(a, b) * scale, scale),
        out_placements=([library.Partial()], None),
        in_placements=([library.Shard(1)], [library.Shard(0)], None),
        redistribute_inputs=True,
    )
    out, scale = product(w, x.redistribute(mesh, [library.Replicate()]), 2.0)
    out.full_tensor().sum().backward()
    return [out.full_tensor().detach(), scale, w.grad.to_local(), x.grad.to_local()]


def both() -> tuple[list[Any], list[Any]]:
    return through(dshard, local_map), through(their_tensor, theirs.local_map)


@pytest.mark.ranks
def test_local_map_gives_what_torchs_gives(ranks: RankPool) -> None:
    for ours, torchs in ranks.run(both):
        for mine, reference in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine, reference)


def test_local_map_takes_uneven_parts_and_plain_tensors() -> None:
    @local_map(out_placements=[Shard(0)])
    def doubled(x: Tensor) -> Tensor:
        assert type(x) is not DTensor
        return x * 2

    x = torch.arange(10.0).view(5, 2)
    assert torch.equal(doubled(x), x * 2)
    with simulated(LINE):
        out = doubled(distribute(x, Layout(LINE, (Shard(0),))))

        assert out.placements == (Shard(0),)
        assert torch.equal(whole(out), x * 2)


def test_local_map_says_what_does_not_fit() -> None:
    with simulated(LINE):
        x = distribute(torch.ones(4, 4), Layout(LINE, (Shard(0),)))
        same: Any = lambda *args: args[0]  # noqa: E731
        with pytest.raises(LayoutError, match=r"argument 0 has the layout \[tp:S\(0\)\], and in_placements say \[R\]"):
            local_map(same, [Replicate()], ([Replicate()],))(x)
        with pytest.raises(ShapeError, match="in_placements has 1 entries for 2 arguments: give one for each"):
            local_map(same, [Replicate()], ([Shard(0)],))(x, 1)
        with pytest.raises(ShapeError, match="out_placements has 2 entries for 1 outputs"):
            local_map(same, ([Shard(0)], None))(x)
        with pytest.raises(LayoutError, match="output 0 is a DTensor: the function must return plain tensors"):
            local_map(lambda _: x)(x)
        with pytest.raises(LayoutError, match="output 0 is no tensor, but out_placements lay it out"):
            local_map(lambda x: 3, [Shard(0)])(x)
        with pytest.raises(LayoutError, match="argument 1 is no tensor, but in_placements lays it out"):
            local_map(same, [Shard(0)], ([Shard(0)], [Shard(0)]))(x, 1)


# -- register_sharding


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_USER", dict(registry._USER))
    monkeypatch.setattr(registry, "_TEXTS", dict(registry._TEXTS))
    yield
    registry.clear_caches()


@torch.library.custom_op("dshard_tests::weighed", mutates_args=())
def weighed(x: Tensor, w: Tensor, power: int) -> Tensor:
    return (x * w).pow(power).sum(-1)


@weighed.register_fake
def _(x: Tensor, w: Tensor, power: int) -> Tensor:
    return x.new_empty(x.shape[:-1])


@torch.library.custom_op("dshard_tests::repeated", mutates_args=())
def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, dim=0)


@repeated.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((3 * x.shape[0], *x.shape[1:]))


@pytest.mark.usefixtures("own_rules")
def test_rows_become_a_rule_that_holds_on_every_layout() -> None:
    @register_sharding(torch.ops.dshard_tests.weighed.default)
    def rows(x: TensorLike, w: TensorLike, power: int) -> list[Any]:
        """Weighed sums: tokens and features may be split."""
        assert x.ndim == 2
        assert x.dtype == torch.float64
        return [
            ([Replicate()], [Replicate(), Replicate(), None]),
            ([Shard(0)], [Shard(0), Replicate(), None]),
            ([Partial()], [Shard(1), Shard(0), None]),
        ]

    @register_sharding(torch.ops.dshard_tests.repeated.default)
    def of_repeated(x: TensorLike) -> list[Any]:
        return [([Shard(d)], [Shard(d)]) for d in range(x.ndim)] + [([Partial()], [Partial()])]

    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    check_rule("dshard_tests::weighed", (x, w, 2), gradients=False)
    check_rule("dshard_tests::repeated", (x,), gradients=False)
    with simulated(LINE), trace() as t:
        split = torch.ops.dshard_tests.weighed(
            distribute(x, Layout(LINE, (Shard(1),))), distribute(w, Layout(LINE, (Shard(0),))), 2
        )
        assert split.placements == (Partial(),)
    assert not t.events
    assert next(row.summary for row in dshard.rules() if row.op == "dshard_tests.weighed.default").startswith("Weighed")


@pytest.mark.usefixtures("own_rules")
def test_a_rule_of_dshards_own_is_replaced() -> None:
    @register_sharding(torch.ops.aten._softmax.default)
    def rows(x: TensorLike, dim: int, half_to_float: bool) -> list[Any]:
        others = [d for d in range(x.ndim) if d != dim % x.ndim]
        return [([Shard(d)], [Shard(d), None, None]) for d in others]

    x = torch.randn(64, 64, dtype=torch.float64)
    with simulated(LINE), trace() as t:
        out = torch.softmax(distribute(x, Layout(LINE, (Shard(1),))), dim=1)
        torch.testing.assert_close(whole(out), x.softmax(1))
        assert torch.softmax(distribute(x, Layout(LINE, (Shard(0),))), dim=1).placements == (Shard(0),)
    assert [event.collective for event in t.events] == ["all_gather"]


@pytest.mark.usefixtures("own_rules")
def test_rows_that_do_not_go_together_are_told() -> None:
    @register_sharding([torch.ops.dshard_tests.weighed.default])
    def rows(x: TensorLike, w: TensorLike, power: int) -> list[Any]:
        return [([Partial()], [Shard(1), Shard(0), None]), ([Partial("max")], [Shard(1), Replicate(), None])]

    @register_sharding(torch.ops.dshard_tests.repeated.default)
    def wrong(x: TensorLike) -> list[Any]:
        return [([Shard(0)], [Shard(0), Shard(0), Shard(0)])]

    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    with simulated(LINE):
        laid = distribute(x, Layout(LINE, (Shard(1),))), distribute(w, Layout(LINE, (Shard(0),)))
        with pytest.warns(UserWarning, match=r"the row \[S\(1\) R\] -> \[P\(max\)\] does not go together") as told:
            out = torch.ops.dshard_tests.weighed(*laid, 2)
        assert told[0].filename == __file__
        torch.testing.assert_close(whole(out), (x * w).pow(2).sum(-1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.ops.dshard_tests.weighed(*laid, 2)
        with pytest.raises(LayoutError, match="for 1 arguments: give a placement for each, None for"):
            torch.ops.dshard_tests.repeated(laid[0])
