"""RMS norms on a device that has torch's fused kernel for them, as CUDA has: it stays one operator each way.

torch's build for CPUs decomposes the norm above the dispatcher. Kernels for CPUs, which are the decompositions, make it
the operator that a GPU sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in, one_way_each
from torch import Tensor

from dshard import Layout, Mesh, Partial, Replicate, Shard, strict
from dshard.core.observe import OperatorMode
from dshard.placements import Placement
from dshard.testing import distribute, simulated, whole
from dshard.torch_private import decomposition_table

FUSED = (torch.ops.aten._fused_rms_norm.default, torch.ops.aten._fused_rms_norm_backward.default)
MESH = Mesh((2, 3), ("a", "b"))
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())


@pytest.fixture(autouse=True, scope="module")
def fused_kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for operator in FUSED:
        library.impl(operator, decomposition_table[operator], "CPU")
    yield
    library._destroy()


def normed(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, grad: Tensor) -> list[Any]:
    """The norm, with the gradients of both."""
    leaves = [t.detach().requires_grad_() for t in (x, weight) if t is not None]
    out = F.rms_norm(leaves[0], shape, leaves[1] if len(leaves) > 1 else None, 1e-5)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(("dtype", "dims"), one_way_each([torch.float64, torch.bfloat16], [1, 2]), ids=str)
@pytest.mark.parametrize("has_weight", one_in(2, [True, False]))
def test_any_layout_has_the_values_and_gradients_of_one_device(dtype: torch.dtype, dims: int, has_weight: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(4, 5, 7, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    shape = (5, 7)[2 - dims :]
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) if has_weight else None
    expected = normed(x, shape, weight, grad)
    near: dict[str, Any] = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-10, "atol": 1e-12}
    for placements, of_grad in product(product(PLACEMENTS, repeat=2), (Shard(0), Shard(2))):
        if dtype is torch.bfloat16 and Partial() in placements:
            continue  # whose terms are rounded
        with simulated(MESH):
            laid = distribute(x, Layout(MESH, placements))
            scale = None if weight is None else distribute(weight, Layout(MESH, (Shard(0), Replicate())))
            found = normed(laid, shape, scale, distribute(grad, Layout(MESH, (of_grad, Replicate()))))
            for each, right in zip(found, expected, strict=True):
                torch.testing.assert_close(whole(each), right, **near)


def test_sharded_rows_are_normed_by_the_kernel_alone() -> None:
    mesh, counted = Mesh((2, 2), ("a", "b")), Counter[Any]()

    def count(func: Any, args: Any, kwargs: Any) -> Any:
        counted[func] += 1
        return func(*args, **kwargs)

    with simulated(mesh):
        x = distribute(torch.randn(4, 6, 8), Layout(mesh, (Shard(0), Shard(1)))).requires_grad_()
        weight = distribute(torch.randn(8), Layout(mesh, (Replicate(), Replicate()))).requires_grad_()
        for _ in range(3):  # the first one plans
            counted.clear()
            with OperatorMode(count), strict():
                F.rms_norm(x, (8,), weight).backward(x.detach())
        assert [counted[operator] for operator in FUSED] == [mesh.size] * 2
        assert not any(counted[name] for name in (torch.ops.aten.rsqrt.default, torch.ops.aten.mul.Tensor))
