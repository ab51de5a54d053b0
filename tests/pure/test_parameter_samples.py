"""The digest by which ranks tell that they made other parameters."""

from __future__ import annotations

import torch
from torch import nn

from dshard.parallel.same_program import sample_of


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    own = [torch.randn(3, 5), torch.randn(()), torch.randn(4, 4).t(), torch.randn(2, 2, dtype=torch.complex64)]
    own += [torch.randn(3).bfloat16(), torch.ones(3, dtype=torch.bool), torch.eye(3).to_sparse(), torch.empty(0)]
    own += [torch.empty(2, device="meta")]
    return [nn.Parameter(x, requires_grad=False) for x in own]


def test_parameters_that_are_alike_have_one_sample() -> None:
    assert sample_of(parameters()) == sample_of(parameters())
    assert sample_of([]) == sample_of(parameters()[6:]) == 0  # sparse, empty, and without data


def test_another_first_value_of_any_dense_parameter_is_another_sample() -> None:
    samples = {sample_of(parameters())}
    for i in range(6):
        changed = parameters()
        first = changed[i].data.view(-1) if changed[i].is_contiguous() else changed[i].data.t().view(-1)
        first[0] = 0
        samples.add(sample_of(changed))

    assert len(samples) == 7
