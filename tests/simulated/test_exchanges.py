"""Exchanges along a sharded dim: nothing is sent, nor refused by strict, where ranks have what they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dshard import LayoutError, Mesh, Shard, distribute_tensor, explain, strict, trace
from dshard.testing import simulated, whole

KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: x[::2],
    "every third of the features": lambda x: x[:, ::3],
    "padded": lambda x: F.pad(x, (1, 1, 1, 1)),
    "padded by a value": lambda x: F.pad(x, (0, 0, 1, 1), value=2.0),
}
SENT: dict[str, Callable[[Tensor], Tensor]] = {
    "the first rows": lambda x: x[:3],
    "padded at one end": lambda x: F.pad(x, (0, 0, 5, 0)),
    "reversed": lambda x: x.flip(0),
}


@pytest.mark.parametrize("rows", [8, 7, 9])
@pytest.mark.parametrize("name", [*KEPT, *SENT])
def test_strict_refuses_what_sends_and_nothing_else(name: str, rows: int) -> None:
    mesh, function = Mesh((2,), ("x",)), (KEPT | SENT)[name]
    x = torch.arange(rows * 9.0).view(rows, 9).requires_grad_()
    expected = function(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)

    with simulated(mesh):
        for dim in (0, 1):
            shards = distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_()
            sends = [sent for report in explain(function, shards).operators for sent in report.collectives]
            with trace() as traced:
                found = function(shards)

            assert bool(traced.events) == bool(sends)
            torch.testing.assert_close(whole(found.detach()), expected.detach())
            found.square().sum().backward()
            torch.testing.assert_close(whole(shards.grad), grad)
            if not sends:
                with strict():
                    function(shards)
                continue
            assert name in SENT
            with pytest.raises(LayoutError, match=r"which strict\(\) forbids"), strict():
                function(shards)
