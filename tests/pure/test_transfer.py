"""Local tensors into the flat buffers of a collective, and back."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dshard.comm.pieces import Pieces
from dshard.comm.workspace import Session, Workspace

CASES = {
    "even": ((4, 6), 1, (0, 3, 6)),
    "uneven": ((4, 6), 1, (0, 4, 6)),
    "a middle dim": ((2, 3, 4), 1, (0, 1, 2, 3)),
    "a last rank with less": ((3, 2, 5), 2, (0, 2, 4, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_along_any_dim_are_put_together_by_one_operator(name: str) -> None:
    """A copy for each piece would cost the host more than the collective."""
    shape, dim, ends = CASES[name]
    pieces = [tuple(range(a, b) if d == dim else range(n) for d, n in enumerate(shape)) for a, b in pairwise(ends)]
    x = torch.arange(prod(shape)).view(shape)
    flat = torch.cat([x.narrow(dim, a, b - a).flatten() for a, b in pairwise(ends)])

    with CountCopies() as unpacking:
        assert Pieces(pieces, shape).unpack(flat, Session()).equal(x)
    assert unpacking.copies == 1
    assert Pieces(pieces, shape).pack(x, Session()).equal(flat)
    strided = x.transpose(0, dim).contiguous().transpose(0, dim)
    assert Pieces(pieces, shape).pack(strided, Session()).equal(flat)


@pytest.mark.parametrize("name", CASES)
def test_buffers_of_a_workspace_are_filled_alike(name: str) -> None:
    shape, dim, ends = CASES[name]
    pieces = Pieces(
        [tuple(range(a, b) if d == dim else range(n) for d, n in enumerate(shape)) for a, b in pairwise(ends)], shape
    )
    x, equal = torch.arange(prod(shape)).view(shape), name in ("even", "a middle dim")

    with Workspace().session() as space, CountCopies() as counted:
        flat = pieces.pack(x, space)
        assert flat.equal(pieces.pack(x, Session()))
        packed = counted.copies
        assert pieces.unpack(flat, space).equal(x)
    assert not equal or (packed - 1, counted.copies - packed) == (1, 1)  # one more by the packer beside it


class CountCopies(TorchDispatchMode):
    """Counts operators that fill memory."""

    copies = 0
    filling = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten.cat.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func in self.filling
        return func(*args, **(kwargs or {}))
