"""Edges of autograd's graph that are kept while the tensors they lead from are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard.rehearsal.staged_backward import CallGraph


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_nodes_of_python_functions_have_an_owner_beside_their_results() -> None:
    x = torch.ones(3, requires_grad=True)
    result: Any = Doubled.apply(x)  # type: ignore[no-untyped-call]
    node, call = result.grad_fn, CallGraph({1: result}, {0: x})
    del result

    (owner,) = call._owners

    assert owner is not None
    assert owner.next_functions == ((node, 0),)


def test_a_call_runs_when_its_results_are_gone() -> None:
    x = torch.ones(3, requires_grad=True)
    call, came = CallGraph({1: Doubled.apply(x)}, {0: x}), {1: torch.ones(3)}  # type: ignore[no-untyped-call]
    call.begin(came)

    call.run(call.length, came)

    assert came[0].tolist() == [2.0, 2.0, 2.0]
