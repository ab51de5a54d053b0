"""Bad input: each error says what was asked, the rule and the way out, on all ranks alike, before anything is sent."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dshard
from dshard import (
    DeviceMesh,
    DTensor,
    DtypeError,
    Layout,
    LayoutError,
    Mesh,
    MeshError,
    MixedError,
    Partial,
    Replicate,
    ShapeError,
    Shard,
    distribute_tensor,
)
from dshard.comm import listen

MESH = Mesh((2, 2), ("dp", "tp"))


def planned(*shape: int, placements: Any = None, dtype: torch.dtype = torch.float32) -> DTensor:
    """A tensor that is only planned with."""
    return distribute_tensor(torch.empty(shape, dtype=dtype, device="meta"), MESH, placements)


def test_a_dim_out_of_range():
    with pytest.raises(LayoutError, match=r"S\(2\) is out of range: the tensor has 2 dims; use S\(-2\) to S\(1\) or R"):
        planned(4, 4, placements=[Shard(2), Replicate()])


def test_a_scalar_cannot_be_sharded():
    with pytest.raises(LayoutError, match=r"the tensor has 0 dims; use R"):
        planned(placements=[Shard(0), Replicate()])


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(0), Replicate(), Replicate()]])
def test_not_one_placement_for_each_axis(placements):
    with pytest.raises(LayoutError, match=r"for the mesh \(dp=2 tp=2\): give 2, one for each mesh axis"):
        planned(4, 4, placements=placements)


def test_what_is_no_placement():
    with pytest.raises(
        LayoutError, match=r"'S\(0\)' is no placement: use Shard\(dim\), Replicate\(\) or Partial\(op\)"
    ):
        planned(4, 4, placements=["S(0)", Replicate()])


def test_a_recorded_tensor_cannot_be_distributed():
    with pytest.raises(LayoutError, match=r"has recorded, by MulBackward0.*give a leaf such as x.detach\(\), or use"):
        distribute_tensor(torch.ones(4, requires_grad=True) * 2, MESH, [Shard(0), Replicate()])


def test_a_layout_cannot_have_different_reductions():
    with pytest.raises(LayoutError, match="whose order would matter: use one op, or sum and avg, which commute"):
        Layout(MESH, (Partial("sum"), Partial("max")))


def test_a_dtensor_is_not_distributed_twice():
    x = planned(4, 4, placements=[Shard(0), Replicate()])

    with pytest.raises(LayoutError, match=r"was given a DTensor laid out \[dp:S\(0\) tp:R\]: use redistribute"):
        distribute_tensor(x, MESH, [Replicate(), Replicate()])


def test_redistribute_wants_placements():
    with pytest.raises(LayoutError, match=r"redistribute needs the placements to go to: 2 of them"):
        planned(4, 4).redistribute()


def test_redistribute_stays_on_its_type_of_device():
    with pytest.raises(MeshError, match=r"from the mesh \(dp=2 tp=2\) on cpu to the mesh \(x=4\) on cuda: move"):
        planned(4, 4).redistribute(Mesh((4,), ("x",), device_type="cuda"), [Replicate()])


def test_operands_on_different_meshes():
    other = distribute_tensor(torch.empty(4, 4, device="meta"), Mesh((4,), ("x",)), [Shard(0)])

    with pytest.raises(MeshError, match=r"operands on the meshes .*; redistribute them to one mesh first"):
        planned(4, 4) + other


@pytest.mark.parametrize("product", [torch.mm, torch.matmul, F.linear])
def test_dtypes_that_disagree_are_refused(product):
    with pytest.raises(
        DtypeError, match=r"float32 and float64; a matmul takes one dtype, so convert with .to\(dtype\)"
    ):
        product(planned(4, 4), planned(4, 4, dtype=torch.float64))


def test_products_without_a_sum_take_any_dtypes():
    product = torch.einsum("ij,ij->ij", planned(4, 4), planned(4, 4, dtype=torch.float64))
    assert product.dtype == torch.float64
    with pytest.raises(DtypeError, match="a matmul takes one dtype"):
        torch.einsum("ij,jk->ik", planned(4, 4), planned(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("product", [torch.mm, torch.matmul])
def test_sizes_that_disagree_are_torchs_own_error(product):
    with pytest.raises(RuntimeError, match="same reduction dim"):
        product(planned(4, 3), planned(4, 3))


def test_a_plain_tensor_among_distributed_ones():
    with pytest.raises(
        MixedError,
        match=r"plain torch.Tensor of shape \(4, 4\).*distribute_tensor.*implicit_replication\(\).*"
        "0-d tensors, and others of one element, are",
    ):
        planned(4, 4) + torch.ones(4, 4)


def test_numbers_and_scalar_tensors_are_taken_as_they_are():
    assert (planned(4, 4) * 2 + torch.tensor(1.0)).shape == (4, 4)


def test_from_local_of_a_dtensor():
    with pytest.raises(MixedError, match="takes this rank's plain local tensor, not a DTensor"):
        DTensor.from_local(planned(4, 4), MESH)


def test_a_local_tensor_that_is_not_its_part_of_the_shape_given():
    with pytest.raises(ShapeError, match=r"\(4, 3\) at \(0, 0\) cannot be the parts of a tensor of shape \(4, 4\)"):
        DTensor.from_local(torch.empty(4, 3, device="meta"), MESH, [Shard(0), Shard(1)], shape=(4, 4))


def test_what_is_no_mesh():
    with pytest.raises(MeshError, match=r"'cpu' is no mesh: give a DeviceMesh from init_device_mesh, or a dshard.Mesh"):
        distribute_tensor(torch.ones(4), "cpu", [Shard(0)])


def test_a_mesh_needs_a_rank_on_each_axis():
    with pytest.raises(MeshError, match="give each axis at least one rank"):
        Mesh((2, 0))


def test_a_mesh_without_processes_says_how_to_start_them(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("RANK", raising=False)

    with pytest.raises(MeshError, match=r"needs processes: start it with torchrun --nproc-per-node 4.*use dshard.Mesh"):
        dshard.init_device_mesh("cpu", (2, 2))


def test_a_user_rule_without_an_arrow():
    with pytest.raises(dshard.NotationError, match="has no '->': write it like 'm k, k n -> m n'"):
        dshard.register_rule("mylib::broken", "m k, k n")


# -- on real ranks: alike on all, and nothing sent


@cache
def mesh() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


def message_of_uneven_parts() -> tuple[str, int]:
    """What this rank is told, and how many collectives told it."""
    sizes = (3, 1, 2, 3)
    heard: list[Any] = []
    with listen(heard.append):
        try:
            DTensor.from_local(torch.ones(sizes[dist.get_rank()], 2), mesh(), [Shard(0)], run_check=True)
        except ShapeError as error:
            return str(error), len(heard)
    return "", len(heard)


@pytest.mark.ranks
def test_parts_that_are_no_parts_of_one_tensor_are_an_error_on_every_rank(ranks):
    told = ranks.run(message_of_uneven_parts)

    assert len(set(told)) == 1
    assert "cannot be the parts of a tensor of shape (9, 2) laid out [x:S(0)]" in told[0][0]
    assert "split it as torch.chunk does, or use distribute_tensor" in told[0][0]
    assert told[0][1] == 1, "the shapes alone were exchanged"


def uneven_parts_that_fit() -> tuple[int, ...]:
    sizes = (3, 3, 3, 1)
    local = torch.ones(sizes[dist.get_rank()], 2)
    return tuple(DTensor.from_local(local, mesh(), [Shard(0)], run_check=True).shape)


@pytest.mark.ranks
def test_uneven_parts_of_one_tensor_are_understood(ranks):
    assert ranks.run(uneven_parts_that_fit) == [(10, 2)] * 4


def message_of_a_mesh_larger_than_the_world() -> str:
    try:
        dshard.init_device_mesh("cpu", (4, 2))
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_mesh_larger_than_the_world(ranks):
    told = ranks.run(message_of_a_mesh_larger_than_the_world)

    assert set(told) == {"a mesh of (4, 2) has 8 ranks, but the world has 4: start more processes or shrink the mesh"}


def heard_before_errors() -> int:
    """The collectives that run before operands that do not fit are refused."""
    x = distribute_tensor(torch.ones(6, 4), mesh(), [Shard(0)], src_data_rank=None)
    heard: list[Any] = []
    with listen(heard.append):
        for call in (lambda: x @ x, lambda: x + torch.ones(6, 4), lambda: x.redistribute(placements=[Shard(5)])):
            with pytest.raises((RuntimeError, MixedError, LayoutError)):
                call()
    return len(heard)


@pytest.mark.ranks
def test_errors_come_before_any_communication(ranks):
    assert ranks.run(heard_before_errors) == [0] * 4
