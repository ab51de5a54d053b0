"""Functions along a sharded dim give, of half precision, torch's dtype, also under autocast, and round once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dshard import Layout, Mesh, Replicate, Shard
from dshard.parallel import loss_parallel
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2,), ("x",))
LOGITS = torch.randn(515, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
TARGETS = torch.randint(64, (515,), generator=torch.Generator().manual_seed(2))

FUNCTIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "cross_entropy of rows": lambda x, target: F.cross_entropy(x, target, reduction="none"),
    "nll_loss": F.nll_loss,
    "nll_loss, summed": lambda x, target: F.nll_loss(x, target, reduction="sum"),
    "log_softmax": lambda x, target: F.log_softmax(x, 1),
    "rms_norm": lambda x, target: F.rms_norm(x, (64,)),
}


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "no autocast"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_along_a_sharded_dim_is_rounded_once(name: str, enabled: bool) -> None:
    """Half precision is rounded once, and not at all where autocast makes single precision of it."""
    function, exact = FUNCTIONS[name], LOGITS.double().requires_grad_()
    expected = function(exact, TARGETS)
    expected.sum().backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        dtype = function(LOGITS, TARGETS).dtype
    with simulated(MESH):
        x = distribute(LOGITS, Layout(MESH, (Shard(1),))).requires_grad_()
        target = distribute(TARGETS, Layout(MESH, (Replicate(),)))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), loss_parallel():
            out = function(x, target)
        out.sum(dtype=torch.float32).backward()
        assert out.dtype == dtype
        torch.testing.assert_close(whole(out.detach()), expected.detach().to(dtype))
        assert x.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(whole(x.grad), exact.grad.bfloat16(), rtol=1.6e-2, atol=2e-2)
