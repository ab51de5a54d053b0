"""Tensors that come from several streams, as CPU tensors under NCCL's contract show it: with streams made up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dshard import DeviceMesh, Mesh, init_device_mesh, parallelize
from dshard.comm import streams
from dshard.comm.workspace import Workspace
from dshard.testing import nccl_contract, rank_pool


class MadeUp:
    """A stream that does nothing, and knows which others it has followed."""

    def __init__(self) -> None:
        self.followed: list[MadeUp] = []

    def wait_stream(self, other: MadeUp) -> None:
        self.followed.append(other)


class Streams:
    """The streams of a CPU, of which one is current, and the tensors whose memory one of them was recorded for."""

    def __init__(self) -> None:
        self.all, self.recorded = [MadeUp()], list[tuple[Tensor, MadeUp]]()

    @property
    def current(self) -> MadeUp:
        return self.all[-1]

    @contextmanager
    def installed(self) -> Iterator[Streams]:
        """Within the block CPU tensors have these streams."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(streams.CURRENT, "cpu", lambda device: self.current)  # type: ignore[arg-type,return-value]
            patch.setattr(Tensor, "record_stream", lambda x, stream: self.recorded.append((x, stream)))
            yield self


def test_a_mesh_of_gpus_is_planned_for_where_cuda_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refused)

    assert not streams.is_captured(Mesh((2,), ("x",), device_type="cuda"))


def test_a_buffer_that_is_free_on_one_stream_is_not_lent_on_another() -> None:
    space, like = Workspace(), torch.zeros(1)

    def address() -> int:
        with space.session() as session:
            return session.take((4,), like).data_ptr()

    with Streams().installed() as made_up:
        first, again = address(), address()
        made_up.all.append(MadeUp())
        other = address()

    assert first == again != other


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


class Turned(torch.autograd.Function):
    """The identity; from its backward pass on another stream is current."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made_up: Streams) -> Tensor:
        ctx.made_up = made_up
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.made_up.all.append(MadeUp())
        return grad, None


def gradients(strategy: str) -> tuple[int, int, float]:
    """Streams that others followed, tensors recorded, and how far the gradients are from those of one device."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5).double() for _ in range(3)]
    x = torch.randn(8, 5, dtype=torch.float64)
    plain = nn.Sequential(*layers)
    plain(x).square().sum().backward()
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    model: Any = parallelize(plain, mesh(), strategy, x)
    made_up = Streams()
    for layer in model[:2]:
        layer.register_forward_hook(lambda module, args, out: Turned.apply(out, made_up))  # type: ignore[no-untyped-call]
    worst = 0.0
    for _ in range(2):  # the second pass joins gradients while it runs
        model.zero_grad()
        with made_up.installed():
            model(x).square().sum().backward()
        found = [p.grad.full_tensor() for p in model.parameters()]
        worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return sum(len(each.followed) for each in made_up.all), len(made_up.recorded), worst


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_what_is_used_on_one_stream_follows_those_that_it_comes_from(strategy: str) -> None:
    """Gradients of one bucket under data, gathered weights that are used in several backward operators under fsdp."""
    for followed, recorded, worst in rank_pool(4, nccl_contract.BACKEND).run(gradients, strategy):
        assert followed > 0
        assert recorded == followed
        assert worst < 1e-12
