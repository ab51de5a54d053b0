"""The backward of a stage in two parts: the gradients of its inputs, then those of its weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import Mesh, Replicate, Shard, distribute_tensor, trace
from dshard.pipeline.stage import backward, backward_input
from dshard.testing import simulated


class Tangled(nn.Module):
    """A weight used twice, outputs that are saved, an input without gradient, an output of that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(self.a(x)).tanh()
        k = self.b(self.a(h)) + self.c(t)
        return k * h, h, self.c(t).tanh()


def gradients(split: bool, needs: bool, only: slice) -> list[Tensor | None]:
    """Those of the input and the weights, with the outputs of the slice."""
    torch.manual_seed(0)
    module = Tangled().double()
    x, t = torch.randn(5, 4).double().requires_grad_(needs), torch.randn(5, 3).double()
    grads = [torch.randn(5, 4).double() for _ in range(3)]
    outputs = list(zip(module(x, t), grads, strict=True))[only]
    if split:
        finish = backward_input(outputs, [x, t], list(module.parameters()))
        assert all(parameter.grad is None for parameter in module.parameters())
        assert (x.grad is not None) == (needs and only.start != 2)
        del outputs
        finish()
    else:
        backward(outputs)
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("only", [slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3)], ids=str)
def test_both_parts_give_what_the_whole_gives(needs, only):
    for found, expected in zip(gradients(True, needs, only), gradients(False, needs, only), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("asked", "products"), [("x", 1), ("w", 1), ("both", 2)])
def test_a_product_computes_the_gradients_that_are_asked_for(asked, products):
    mesh = Mesh((2,), ("tp",))
    with simulated(mesh):
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.ones(5, 6), mesh, [Replicate()]).requires_grad_()
        out = F.linear(x * 1, w).sum()
        with trace() as traced:
            torch.autograd.backward([out], inputs={"x": [x], "w": [w], "both": [x, w]}[asked])

        assert traced.operators.count("linear backward") == products
        assert [x.grad is not None, w.grad is not None] == [asked != "w", asked != "x"]
