"""A layer of experts by every choice of loops, by the dispatcher's choice, and written by hand, timed in turns.

    python benchmarks/experts.py [--netlab netlab.py] [--json FILE] [--write] [--only N]

On four gloo ranks of this machine, and with --netlab (a program that runs ranks on emulated hosts with slow links, as
root) on two hosts of two ranks. First the topology is measured; then every case runs there and back with all loops in
turn, tokens and experts split over all ranks. The regret of the choice is its time over that of the fastest. A turn
takes as long as its slowest rank; of the turns the faster half counts. Then the choice runs beside three others: a
program that sorts rows and calls grouped products on distributed tensors, each by its own rule; and two by hand on
torch.distributed: a row to each expert by all_to_all, and experts gathered. Ratios are medians of those of neighbours,
with quartiles. `--json` keeps what every setting found, and those that it has are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loops import by_all_loops, choice_row, ratio, ratio_cell, run_cases, run_settings
from settings import Rows, in_turns
from torch import Tensor

import dshard
from dshard import DTensor, Shard
from dshard.comm import DeviceMesh, bind, runtime_of
from dshard.rules.expert_loops import EXPERTS
from dshard.tools.calibrate.rounds import Clock

SECONDS, SECONDS_BESIDE = 3.0, 2.0
"""What the turns of a case may take, where they need not take longer: of all loops, and of the choice beside others."""


@dataclass(frozen=True)
class Case:
    """One layer: tokens on all ranks, features, inner features, experts, and the experts of a token."""

    tokens: int
    width: int
    inner: int
    experts: int
    k: int
    axes: tuple[str, ...] = ("x",)

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens of {self.width}, {self.k} of {self.experts} experts of {self.inner}"
        return f"{sizes}, on {' '.join(self.axes)}"


CASES = (
    Case(1024, 128, 128, 16, 2),
    Case(2048, 128, 64, 16, 4),
    Case(512, 256, 512, 16, 2),
    Case(4096, 64, 64, 8, 2),
    Case(8192, 64, 32, 8, 2),
    Case(256, 256, 256, 32, 4),
    Case(1024, 256, 128, 64, 8),
    Case(16384, 64, 16, 16, 4),
    Case(2048, 128, 128, 16, 2, axes=("a", "b")),
    Case(1024, 256, 128, 32, 8, axes=("a", "b")),
)
RULE = "e f d, e f d, e d f"
BODY = dshard.mlp_experts()


# -- on every rank


def as_rank(seconds: float, turns: int) -> Rows:
    """All cases; the same rows on every rank."""
    return run_cases(CASES, run_case, seconds, turns)


def run_case(case: Case, device_mesh: DeviceMesh, turns: int) -> dict[str, Any]:
    """One case, by all loops, and by the choice beside what one would write instead."""
    mesh = bind(device_mesh)
    torch.manual_seed(0)
    d, f, e = case.width, case.inner, case.experts
    index = torch.rand(case.tokens, e).topk(case.k).indices
    shapes = (case.tokens, case.k), (e, f, d), (e, f, d), (e, d, f)
    given = [torch.randn(case.tokens, d), index, *(torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes)]
    placements = [Shard(0)] * mesh.ndim
    laid = [dshard.distribute_tensor(t, device_mesh, placements, src_data_rank=None) for t in given]
    operands = [t.requires_grad_(t.is_floating_point()) for t in laid]
    leaves = [t for t in operands if t.requires_grad]
    grad = torch.ones_like(operands[0]).detach()
    call = partial(_there_and_back, partial(_forward, operands), leaves, grad)
    clock = Clock(mesh, runtime_of(mesh))  # type: ignore[arg-type]  # there are processes
    loops = product(EXPERTS.loops, repeat=mesh.ndim)
    chosen, runs, predicted = by_all_loops("experts", loops, call, partial(_forward, operands))
    times = in_turns(runs, clock, turns, SECONDS)
    local = [t.to_local().detach().requires_grad_(t.is_floating_point()) for t in operands]
    local_leaves = [t for t in local if t.requires_grad]
    others = {
        "chosen": call,
        "sorted": partial(_there_and_back, partial(by_operators, operands), leaves, grad),
        "rows": partial(_there_and_back, partial(by_rows, local, e), local_leaves, grad.to_local()),
        "experts": partial(_there_and_back, partial(by_experts, local, e), local_leaves, grad.to_local()),
    }
    beside = in_turns(others, clock, turns, SECONDS_BESIDE)
    return {
        **choice_row(case, chosen, times, clock, call),
        **{name: ratio(beside[name], beside["chosen"]) for name in OTHERS},
        "predicted": predicted,
    }


def _forward(operands: Sequence[DTensor]) -> Any:
    return dshard.experts(BODY, *operands, rule=RULE)


def _there_and_back(forward: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> object:
    return torch.autograd.grad(forward(), leaves, grad)


# -- what one would write instead


def _products(rows: Tensor, ends: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = F.silu(_grouped(rows, gate, ends)) * _grouped(rows, up, ends)
    return _grouped(hidden, down, ends)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def by_operators(operands: Sequence[Tensor]) -> Tensor:
    """Rows sorted by expert and grouped products, as libraries of models write it, with an operator for each line."""
    x, index, weight, *parameters = operands
    k, total = index.shape[1], parameters[0].shape[0]
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=total).cumsum(0).to(torch.int32)
    out = _products(x[order // k], ends, *parameters) * weight.reshape(-1)[order].unsqueeze(1)
    return out[torch.argsort(order)].view(-1, k, x.shape[1]).sum(1)


class _Swap(torch.autograd.Function):
    """Rows for each rank -> rows from each; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        ctx.sizes = send, recv
        out = x.new_empty((sum(recv), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        send, recv = ctx.sizes
        return _Swap.apply(grad, recv, send), None, None  # type: ignore[no-untyped-call]


def by_rows(local: Sequence[Tensor], total: int) -> Tensor:
    """Expert parallelism by hand: a row for each pair of a token and an expert goes to its rank, and comes back."""
    x, index, weight, *parameters = local
    ranks, k = dist.get_world_size(), index.shape[1]
    here = total // ranks
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=total)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    send, recv = counts.view(ranks, here).sum(1).tolist(), theirs.view(ranks, here).sum(1).tolist()
    rows = _Swap.apply(x[order // k], send, recv)  # type: ignore[no-untyped-call]
    numbers = torch.arange(here).repeat(ranks).repeat_interleave(theirs)
    by_expert = torch.argsort(numbers, stable=True)
    ends = theirs.view(ranks, here).sum(0).cumsum(0).to(torch.int32)
    out = torch.empty_like(rows).index_copy(0, by_expert, _products(rows[by_expert], ends, *parameters))
    back = _Swap.apply(out, recv, send) * weight.reshape(-1)[order].unsqueeze(1)  # type: ignore[no-untyped-call]
    return torch.zeros_like(x).index_add(0, order // k, back)


class _Gather(torch.autograd.Function):
    """The experts of all ranks; their gradients are summed where they are stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty((grad.shape[0] // dist.get_world_size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


def by_experts(local: Sequence[Tensor], total: int) -> Tensor:
    """FSDP by hand: experts gathered, each rank computes its own tokens."""
    x, index, weight, *parameters = local
    k, flat = index.shape[1], index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=total).cumsum(0).to(torch.int32)
    whole = [_Gather.apply(p) for p in parameters]  # type: ignore[no-untyped-call]
    out = _products(x[order // k], ends, *whole) * weight.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // k, out)


# -- on the machine that starts them


HEADER = (
    *("ranks", "case", "chosen", "ms", "fastest of", "ms", "regret", "MiB received"),
    *("operators / chosen", "rows by hand / chosen", "experts by hand / chosen"),
)
OTHERS = ("sorted", "rows", "experts")


def cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['received'] / 2**20:.2f}",
        *(ratio_cell(row, other) for other in OTHERS),
    ]


def summary(rows: Rows) -> str:
    """The regret, and how much slower the others are, in one line."""
    regrets, by_rules = [row["regret"] for row in rows], [row["sorted"][1] for row in rows]
    by_hand = [min(row["rows"][1], row["experts"][1]) for row in rows]
    return (
        f"regret median {median(regrets):.2f}, worst {max(regrets):.2f}; operators / chosen median "
        f"{median(by_rules):.2f}, least {min(by_rules):.2f}; the better by hand / chosen geometric mean "
        f"{geometric_mean(by_hand):.2f}, least {min(by_hand):.2f}"
    )


if __name__ == "__main__":
    run_settings("experts", (__doc__, __file__), as_rank, HEADER, cells, summary)
