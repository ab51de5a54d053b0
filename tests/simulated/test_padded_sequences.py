"""Sequences of several lengths, padded to one: values and gradients of any order are those of one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dshard import Layout, Mesh, MixedError, Partial, Replicate, Shard
from dshard.ops.custom import wrapped
from dshard.placements import Placement
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2,), ("x",))
WHOLE = torch.linspace(-2, 3, 40, dtype=torch.float64).reshape(8, 5)
WAYS = {
    "plainly": pad_sequence,
    "batch first": partial(pad_sequence, batch_first=True, padding_value=0.5),
    "left": partial(pad_sequence, padding_side="left"),
}


def derivatives(way: str, x: Tensor) -> list[Tensor]:
    """The padded rows of `x`, their gradient, and the gradient of that: of lengths 3, 1, 0 and 4."""
    x = x.detach().requires_grad_()
    padded = WAYS[way]((x * 2).split([3, 1, 0, 4]))
    [gradient] = torch.autograd.grad(padded.pow(3).sum(), x, create_graph=True)
    return [padded, gradient, *torch.autograd.grad(gradient.square().sum(), x)]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
@pytest.mark.parametrize("way", WAYS)
def test_sequences_are_padded_as_on_one_device(way: str, placement: Placement) -> None:
    with simulated(MESH):
        found = [whole(each) for each in derivatives(way, distribute(WHOLE, Layout(MESH, [placement])))]
    for value, expected in zip(found, derivatives(way, WHOLE), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_they_have_the_dtype_of_the_first_and_a_side() -> None:
    with simulated(MESH):
        x = distribute(WHOLE, Layout(MESH, [Shard(0)]))
        assert pad_sequence([x[:2].float(), x]).dtype == torch.float32
        with pytest.raises(RuntimeError, match="padded on the left or on the right"):
            pad_sequence([x], padding_side="top")


def test_a_plain_result_that_autograd_has_recorded_is_refused() -> None:
    """Which a function of torch makes that writes its operands to a tensor of its own: its gradients would be lost."""
    with simulated(MESH):
        x = distribute(WHOLE, Layout(MESH, [Shard(0)]))
        with pytest.raises(MixedError, match="wrote distributed tensors to a plain one"):
            wrapped(torch.zeros(2, requires_grad=True) * 2, (x,))
