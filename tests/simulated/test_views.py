"""Views, joins and indexing equal single-device torch, values and gradients, however their operands lie."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any, TypeAlias

import pytest
import torch
from helpers.default_cases import THOROUGH, one_way_each
from helpers.view_cases import Function, assert_same, rows
from torch import Tensor

from dshard import Layout, Mesh, Partial, Replicate, Shard
from dshard.placements import Placement, ReduceOp
from dshard.testing import distribute, simulated

Tensors: TypeAlias = tuple[Tensor, ...]
LINE, SQUARE = Mesh((3,), ("x",)), Mesh((2, 2), ("x", "y"))
SAMPLE = 4
"""How many layouts of the two-axis mesh the default tests take."""


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


CASES: dict[str, tuple[Function, Tensors]] = {
    "view splits": (lambda x: x.view(4, 2, 3, 5), (rows(8, 3, 5),)),
    "view merges": (lambda x: x.view(6, 5), (rows(2, 3, 5),)),
    "view merges uneven": (lambda x: x.view(15, 2), (rows(5, 3, 2),)),
    "view regroups": (lambda x: x.view(2, 12), (rows(4, 6),)),
    "view shares a factor": (lambda x: x.view(4, 6), (rows(6, 4),)),
    "view shares nothing": (lambda x: x.view(5, 3), (rows(3, 5),)),
    "view drops ones": (lambda x: x.view(3, 4), (rows(1, 3, 1, 4),)),
    "view adds ones": (lambda x: x.view(1, 3, 1, 4, 1), (rows(3, 4),)),
    "view keeps one": (lambda x: x.view(1, 8), (rows(1, 2, 4),)),
    "view -1": (lambda x: x.view(-1, 2), (rows(3, 4),)),
    "view of nothing": (lambda x: x.view(0, 2, 2), (rows(0, 4),)),
    "view to nothing": (lambda x: x.view(3, 0), (rows(0, 4),)),
    "view scalar": (lambda x: x.view(()), (rows(1),)),
    "heads": (lambda x: x.view(2, 3, 2, 2).transpose(1, 2).reshape(4, 3, 2), (rows(2, 3, 4),)),
    "heads back": (lambda x: x.transpose(1, 2).reshape(2, 3, 8), (rows(2, 4, 3, 2),)),
    "view of dtype": (lambda x: x.detach().view(torch.int64), (rows(2, 3),)),
    "view of smaller dtype": (lambda x: x.detach().view(torch.int32), (rows(2, 3),)),
    "reshape": (lambda x: x.t().reshape(-1), (rows(4, 3),)),
    "flatten": (lambda x: x.flatten(1), (rows(3, 4, 2),)),
    "unflatten": (lambda x: x.unflatten(-1, (2, -1)), (rows(3, 8),)),
    "t": (lambda x: x.t(), (rows(4, 3),)),
    "t of one dim": (lambda x: x.t(), (rows(4),)),
    "transpose": (lambda x: x.transpose(-1, 0), (rows(4, 3, 2),)),
    "permute": (lambda x: x.permute(2, 0, -2), (rows(4, 3, 2),)),
    "movedim": (lambda x: x.movedim(0, -1), (rows(4, 3, 2),)),
    "unsqueeze": (lambda x: x.unsqueeze(-2), (rows(4, 3),)),
    "squeeze": (lambda x: x.squeeze(), (rows(4, 1, 3, 1),)),
    "squeeze dim": (lambda x: x.squeeze(-1), (rows(4, 3, 1),)),
    "squeeze no dim": (lambda x: x.squeeze(0), (rows(4, 3),)),
    "squeeze dims": (lambda x: x.squeeze((0, -1)), (rows(1, 3, 1),)),
    "squeeze shards of one": (lambda x: x.squeeze(), (rows(3, 2, 1),)),
    "expand": (lambda x: x.expand(2, -1, 4, 3), (rows(2, 1, 3),)),
    "expand scalar": (lambda x: x.expand(3), (rows(),)),
    "expand_as": (lambda x, y: x.expand_as(y), (rows(1, 3), rows(4, 3))),
    "select": (lambda x: x.select(-1, -2), (rows(4, 3),)),
    "select twice": (lambda x: x[1, :, 2], (rows(4, 2, 3),)),
    "slice": (lambda x: x[1:4:2], (rows(5, 3),)),
    "slice all": (lambda x: x[:, 0:100], (rows(4, 5),)),
    "slice none": (lambda x: x[3:3], (rows(4, 2),)),
    "slice from the end": (lambda x: x[..., -2:], (rows(4, 5),)),
    "narrow": (lambda x: x.narrow(1, 1, 3), (rows(3, 5),)),
    "diagonal": (lambda x: x.diagonal(1, 0, 2), (rows(4, 3, 5),)),
    "diag_embed": (lambda x: torch.diag_embed(x, -1, 0, 2), (rows(4, 3),)),
    "unfold": (lambda x: x.unfold(1, 2, 2), (rows(3, 5),)),
    "unfold scalar": (lambda x: x.unfold(0, 1, 1), (rows(),)),
    "split": (lambda x: x.split(2, -1), (rows(4, 5),)),
    "split with sizes": (lambda x: x.split([1, 3], 0), (rows(4, 5),)),
    "unsafe split": (lambda x: torch.unsafe_split(x, 2, 0), (rows(5, 3),)),
    "sections by name": (lambda x: torch.tensor_split(x, sections=2, dim=1), (rows(4, 5),)),
    "indices by name": (lambda x: x.tensor_split(indices=(1, 3)), (rows(4, 2),)),
    "distributed indices": (lambda x, i: x.tensor_split(tensor_indices_or_sections=i), (rows(4, 2), ids(1, 3))),
    "chunk": (lambda x: x.chunk(3, 1), (rows(3, 7),)),
    "unbind": (lambda x: x.unbind(1), (rows(4, 3, 2),)),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 0, 1), (rows(4, 3), rows(3))),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 0, 1, 3), (rows(4, 3), rows(2, 3))),
    "diagonal_scatter": (lambda x, y: torch.diagonal_scatter(x, y), (rows(4, 3), rows(3))),
    "as real": (lambda x: torch.view_as_real(torch.view_as_complex(x)), (rows(4, 3, 2),)),
    "cat": (lambda x, y: torch.cat([x, y], -1), (rows(4, 3), rows(4, 2))),
    "cat of nothing": (lambda x, y: torch.cat([y, x]), (rows(4, 3), rows(0))),
    "cat three": (lambda x, y: torch.cat([x, y, x * 2]), (rows(4, 3), rows(2, 3))),
    "cat dtypes": (lambda x, y: torch.cat([x, y]), (rows(4), ids(1, 2))),
    "stack": (lambda x, y: torch.stack([x, y], -1), (rows(4, 3), rows(4, 3))),
    "stack first": (lambda x, y: torch.stack([x, y]), (rows(5), rows(5))),
    "flip": (lambda x: x.flip(-1, 0), (rows(4, 3, 2),)),
    "rot90": (lambda x: x.rot90(1, (0, 2)), (rows(4, 3, 2),)),
    "roll": (lambda x: x.roll(2, -1), (rows(4, 5),)),
    "roll everything": (lambda x: x.roll(3), (rows(4, 5),)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (rows(4, 2),)),
    "repeat nothing": (lambda x: x.repeat(0, 1), (rows(4, 3),)),
    "tile": (lambda x: x.tile(3), (rows(3, 2),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), (rows(5, 3),)),
    "tril": (lambda x: x.tril(-1), (rows(2, 5, 4),)),
    "triu": (lambda x: x.triu(1), (rows(4, 5),)),
    "pad": (lambda x: torch.nn.functional.pad(x, (1, 2)), (rows(4, 3),)),
    "pad a value": (lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0), value=2.0), (rows(4, 3),)),
    "crop": (lambda x: torch.nn.functional.pad(x, (-1, 1)), (rows(4, 3),)),
    "new_zeros": (lambda x: x.detach().new_zeros(4, 2), (rows(4, 3),)),
    "new_ones": (lambda x: x.detach().new_ones(x.shape, dtype=torch.int32), (rows(4, 3),)),
    "new_full": (lambda x: x.detach().new_full((5,), 7.0), (rows(4, 3),)),
    "new_empty": (lambda x: x.detach().new_empty(4, 3).fill_(2), (rows(4, 3),)),
    "new_empty_strided": (lambda x: x.detach().new_empty_strided((4, 3), (1, 4)).fill_(2), (rows(4, 3),)),
    "gather": (lambda x, i: x.gather(1, i), (rows(4, 3), ids(0, 2, 1, 1, 0, 0, 2, 2).view(4, 2))),
    "gather fewer rows": (lambda x, i: x.gather(-1, i), (rows(4, 3), ids(0, 2, 1, 1).view(2, 2))),
    "gather scalar": (lambda x, i: x.gather(0, i), (rows(), torch.tensor(0))),
    "scatter": (lambda x, i, y: x.scatter(0, i, y), (rows(4, 3), ids(0, 2, 1, 3, 0, 0).view(2, 3), rows(2, 3))),
    "scatter a value": (lambda x, i: x.scatter(1, i, 2.0), (rows(4, 3), ids(0, 2, 1, 1).view(4, 1))),
    "scatter zeros": (lambda x, i: x.scatter(1, i, 0.0), (rows(4, 3), ids(0, 2, 1, 1).view(4, 1))),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), (rows(4, 3), ids(0, 2, 1, 1, 0, 0).view(2, 3), rows(2, 3))),
    "scatter_add rows": (
        lambda x, i, y: x.scatter_add(1, i, y.detach()),
        (rows(4, 3), ids(0, 2, 1, 1).view(2, 2), rows(3, 2)),
    ),
    "scatter_reduce": (
        lambda x, i, y: x.scatter_reduce(0, i, y, "amax"),
        (rows(4, 3), ids(0, 2, 1, 3, 0, 0).view(2, 3), rows(2, 3) * 3),
    ),
    "index_select": (lambda x, i: x.index_select(1, i), (rows(4, 3), ids(2, 0, 0, 1, 2))),
    "index_add": (lambda x, i, y: x.index_add(0, i, y, alpha=2), (rows(4, 3), ids(2, 0), rows(2, 3))),
    "index_copy": (lambda x, i, y: x.index_copy(0, i, y), (rows(4, 3), ids(2, 0), rows(2, 3))),
    "index_fill": (lambda x, i: x.index_fill(-1, i, 2.0), (rows(4, 3), ids(2, 0))),
    "index": (lambda x, i: x[i], (rows(4, 3), ids(2, 0, 0))),
    "index inside": (lambda x, i: x[:, i], (rows(4, 3, 2), ids(2, 0, 0, 1).view(2, 2))),
    "index two": (lambda x, i, j: x[:, i, j], (rows(2, 3, 4), ids(2, 0, 0), ids(1, 3, 0))),
    "index apart": (lambda x, i, j: x[i, :, j], (rows(2, 3, 4), ids(1, 0, 0).view(3, 1), ids(1, 3))),
    "index mask": (lambda x, m: x[m], (rows(4, 3), ids(1, 0, 1, 1).bool())),
    "index_put": (lambda x, i, y: x.index_put((i,), y), (rows(4, 3), ids(2, 0), rows(2, 3))),
    "index_put adds": (lambda x, i, y: x.index_put((i,), y, accumulate=True), (rows(4, 3), ids(2, 2), rows(3))),
    "index_put apart": (
        lambda x, i, j, y: torch.ops.aten.index_put(x, [i, None, j], y),
        (rows(2, 3, 4), ids(1, 0), ids(1, 3), rows(1, 3)),
    ),
    "index_put mask": (lambda x, m, y: x.index_put((m,), y), (rows(4, 3), rows(4, 3) > 0, rows())),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), (rows(4, 3), ids(0, 2, 1, 1).view(4, 1))),
}


def layouts(mesh: Mesh, ndim: int, *ops: ReduceOp) -> list[Layout]:
    """Every dim sharded, replicated, and partial with one of `ops`, on every axis; one op in each layout."""
    found: dict[Layout, None] = {}
    for op in ops or (None,):
        one = [Replicate(), *map(Shard, range(ndim)), *([Partial(op)] if op else [])]
        found |= {Layout(mesh, placements): None for placements in product(one, repeat=mesh.ndim)}
    return list(found)


def choices(name: str, inputs: Tensors, mesh: Mesh, *ops: ReduceOp) -> list[list[Layout]]:
    """Layouts of all operands, shuffled: each of the one that has most, the others drawn. Indices are never partial."""
    draw = Random(f"{name}{ops}")
    found = [layouts(mesh, x.ndim, *(ops if x.is_floating_point() else ())) for x in inputs]
    for options in found:
        draw.shuffle(options)
    return [[options[i % len(options)] for options in found] for i in range(max(map(len, found)))]


def as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def single_device(function: Function, inputs: Tensors) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """Outputs, gradients given to those that have one, gradients of the inputs."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = as_tuple(function(*leaves))
    with_grad = [out for out in outputs if out.requires_grad]
    cotangents = [torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape) for out in with_grad]
    if with_grad:
        torch.autograd.backward(with_grad, cotangents)
    return [out.detach() for out in outputs], cotangents, [leaf.grad for leaf in leaves]


def check(name: str, mesh: Mesh, n: int | None = None) -> None:
    """Values and gradients equal those of single-device torch, for `n` choices of layouts, or all."""
    function, inputs = CASES[name]
    expected, cotangents, gradients = single_device(function, inputs)
    with simulated(mesh):
        for laid in choices(name, inputs, mesh, "sum")[:n]:
            leaves = [distribute(x, layout) for x, layout in zip(inputs, laid, strict=True)]
            for leaf in leaves:
                leaf.requires_grad_(leaf.is_floating_point())
            outputs = as_tuple(function(*leaves))
            for out, value in zip(outputs, expected, strict=True):
                assert_same(out.detach(), value)
            with_grad = [out for out in outputs if out.requires_grad]
            given = [distribute(x, out.layout.cotangent()) for x, out in zip(cotangents, with_grad, strict=True)]
            if given:
                torch.autograd.backward(with_grad, given)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                assert_same(leaf.grad, gradient)


def check_partial(name: str, mesh: Mesh, op: ReduceOp, n: int | None = None) -> None:
    """Values are right of partial operands."""
    function, inputs = CASES[name]
    expected = as_tuple(function(*inputs))
    with simulated(mesh):
        for laid in choices(name, inputs, mesh, op)[:n]:
            outputs = as_tuple(function(*[distribute(x, layout) for x, layout in zip(inputs, laid, strict=True)]))
            for out, value in zip(outputs, expected, strict=True):
                assert_same(out, value)


@pytest.mark.parametrize(("name", "mesh"), one_way_each(CASES, [LINE, SQUARE]), ids=str)
def test_they_are_those_of_one_device(name: str, mesh: Mesh) -> None:
    check(name, mesh, SAMPLE if mesh == SQUARE else None)


@pytest.mark.parametrize("op", ["avg", "product", "max", "min"])
def test_views_of_partial_operands_equal_one_device(op: ReduceOp) -> None:
    for name in CASES:
        check_partial(name, Mesh((2,), ("x",)), op, 3 if THOROUGH else 1)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_views_on_larger_meshes_equal_one_device(name: str, shape: tuple[int, ...]) -> None:
    check(name, Mesh(shape, ("x", "y", "z")[: len(shape)]), 200)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_views_begin_where_those_of_one_device_do(placement: Placement) -> None:
    views: tuple[Callable[[Any], Any], ...] = (
        lambda z: z[1:].detach(),
        lambda z: z[1:].imag,
        lambda z: torch.view_as_real(z[1:]),
        lambda z: torch.view_as_complex(torch.view_as_real(z)[1:]),
    )
    z, mesh = torch.complex(rows(4, 3), rows(4, 3)), Mesh((2,), ("x",))
    with simulated(mesh):
        y = distribute(z, Layout(mesh, (placement,)))
        assert [view(y).storage_offset() for view in views] == [view(z).storage_offset() for view in views]
