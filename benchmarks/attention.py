"""Attention by every choice of loops, by the dispatcher's choice, and by torch's ring, timed in turns.

    python benchmarks/attention.py [--netlab netlab.py] [--json FILE] [--write] [--only N]

On four gloo ranks of this machine, and with --netlab (a program that runs ranks on emulated hosts with slow links, as
root) on two hosts of two ranks. First the topology is measured; then every case runs with all loops in turn, from the
same operands to the same layout of the result. The regret of the choice is its time over that of the fastest. A turn
takes as long as its slowest rank; of the turns the faster half counts. Then the choice, the gathered form (loop q on
every mesh axis) and torch's ring run in turn alone: ratios are medians of those of neighbours, with quartiles. torch's
`context_parallel` has no kernel on CPUs, so its ring is handed that of the CPU. `--json` keeps what every setting
found, and those that it has are not run again.
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
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

import dshard
from dshard import DTensor, Replicate, Shard, explain
from dshard.comm import DeviceMesh, bind, runtime_of
from dshard.rules.attention_loops import AttentionLoops
from dshard.tools.calibrate.rounds import Clock

SECONDS, SECONDS_BESIDE = 3.0, 2.0
"""What the turns of a case may take, where they need not take longer: of all loops, and of the choice beside others."""


@dataclass(frozen=True)
class Case:
    """One call: sizes, and the mesh whose axes all split the sequences; one query alone is replicated."""

    heads: int
    key_heads: int
    queries: int
    keys: int
    size: int
    causal: bool = False
    backward: bool = False
    axes: tuple[str, ...] = ("x",)

    def __str__(self) -> str:
        lengths = _thousands(self.queries) + ("" if self.queries == self.keys else f" x {_thousands(self.keys)}")
        kind = f"{'causal, ' if self.causal else ''}{'there and back' if self.backward else 'there'}"
        return f"{lengths}, {self.heads} of {self.key_heads} heads, {kind}, on {' '.join(self.axes)}"


def _thousands(n: int) -> str:
    return f"{n // 1024} K" if n >= 1024 else str(n)


K = 1024
CASES = (
    Case(1, 1, K, K, 64),
    Case(8, 8, K, K, 64, causal=True, backward=True),
    Case(32, 8, K, K, 32, causal=True, backward=True),
    Case(32, 1, K, K, 32, causal=True),
    Case(4, 4, 4 * K, 4 * K, 32, causal=True, backward=True),
    Case(8, 2, 4 * K, 4 * K, 32),
    Case(1, 1, 4 * K, 4 * K, 64, backward=True),
    Case(8, 8, 2 * K, 2 * K, 32, causal=True, axes=("a", "b")),
    Case(2, 2, 4 * K, 4 * K, 32, axes=("a", "b")),
    Case(1, 1, 16 * K, 16 * K, 32, causal=True, backward=True),
    Case(4, 1, 16 * K, 16 * K, 16),
    Case(1, 1, 64 * K, 64 * K, 16, causal=True),
    Case(8, 2, 512, 64 * K, 32),
    Case(32, 8, 1, 16 * K, 32),
)
# -- on every rank


def as_rank(seconds: float, turns: int) -> Rows:
    """All cases; the same rows on every rank."""
    return run_cases(CASES, run_case, seconds, turns)


def run_case(case: Case, device_mesh: DeviceMesh, turns: int) -> dict[str, Any]:
    """One case, by all loops, and by the choice beside the gathered form and torch's ring."""
    mesh = bind(device_mesh)
    torch.manual_seed(0)
    shapes = (case.heads, case.queries), (case.key_heads, case.keys), (case.key_heads, case.keys)
    given = [torch.randn(1, heads, n, case.size) for heads, n in shapes]
    operands = [_distributed(x, device_mesh).requires_grad_(case.backward) for x in given]
    call = partial(_attention, operands, case)
    clock = Clock(mesh, runtime_of(mesh))  # type: ignore[arg-type]  # there are processes
    loops, forward = _all_loops(mesh.ndim, case.causal), partial(_forward, operands, case)
    chosen, runs, predicted = by_all_loops("attention", loops, call, forward)
    times = in_turns(runs, clock, turns, SECONDS)
    pair = {"chosen": call, "gathered": runs[" ".join("q" * mesh.ndim)]}
    ring = torch_ring(given, case, dist.group.WORLD)
    beside = in_turns(pair if ring is None else pair | {"torch": ring}, clock, turns, SECONDS_BESIDE)
    return {
        **choice_row(case, chosen, times, clock, call),
        "bound": explain(forward).chosen.bound_ratio,
        "gathered": ratio(beside["gathered"], beside["chosen"]),
        "torch": ratio(beside["torch"], beside["chosen"]) if ring is not None else None,
        "predicted": predicted,
    }


def _all_loops(ndim: int, causal: bool) -> list[AttentionLoops]:
    """Every choice of loops; halves are swapped where that balances something."""
    forms = list(product(("h", "q", "k", "ring"), repeat=ndim))
    balanced = [tuple("balanced ring" if loop == "ring" else loop for loop in form) for form in forms if "ring" in form]
    return [*forms, *(balanced if causal else [])]  # type: ignore[list-item]


def _distributed(x: Tensor, mesh: DeviceMesh) -> DTensor:
    placement = Replicate() if x.shape[2] == 1 else Shard(2)
    return dshard.distribute_tensor(x, mesh, [placement] * mesh.ndim, src_data_rank=None)


def _forward(operands: Sequence[DTensor], case: Case) -> DTensor:
    grouped = case.heads != case.key_heads
    return F.scaled_dot_product_attention(*operands, is_causal=case.causal, enable_gqa=grouped)  # type: ignore[misc,return-value]


def _attention(operands: Sequence[DTensor], case: Case) -> object:
    out = _forward(operands, case)
    return torch.autograd.grad(out, list(operands), torch.ones_like(out)) if case.backward else out


def torch_ring(given: Sequence[Tensor], case: Case, group: Any) -> Callable[[], object] | None:
    """torch's ring with the CPU's kernel, balanced where causal; None for what it does not take.

    Key heads are repeated first, which is not counted.
    """
    n = dist.get_world_size(group)
    if case.queries != case.keys:
        return None
    rank, aten = dist.get_rank(group), torch.ops.aten
    repeats = (1, *(case.heads // case.key_heads,) * 2)
    local = [x.repeat_interleave(k, 1).chunk(n, 2)[rank].contiguous() for x, k in zip(given, repeats, strict=True)]
    common = {"is_causal": case.causal, "dropout_p": 0.0}

    def run() -> object:
        theirs._cp_options.enable_load_balance = case.causal
        kernel: Any = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = theirs._templated_ring_attention(group, 2, kernel, *local, **common)  # type: ignore[arg-type]
        if not case.backward:
            return out
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        ones = torch.ones_like(out)
        return theirs._templated_ring_attention_backward(
            *(group, 2, kernel, ones, "grad_out", *local, out, lse), **common
        )

    return run


# -- on the machine that starts them


HEADER = (
    *("ranks", "case", "chosen", "ms", "fastest of", "ms", "regret", "MiB received", "x bound"),
    *("gathered / chosen", "torch's ring / chosen"),
)


def cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['received'] / 2**20:.2f}",
        "-" if row["bound"] is None else f"{row['bound']:.2f}",
        *(ratio_cell(row, other) for other in OTHERS),
    ]


OTHERS = ("gathered", "torch")


def summary(rows: Rows) -> str:
    """The regret, and how much slower the others are, in one line."""
    regrets = [row["regret"] for row in rows]
    gathered, ring = ([row[other][1] for row in rows if row[other] is not None] for other in OTHERS)
    return (
        f"regret median {median(regrets):.2f}, worst {max(regrets):.2f}; gathered / chosen geometric mean "
        f"{geometric_mean(gathered):.2f}, most {max(gathered):.2f}; torch's ring / chosen geometric mean "
        f"{geometric_mean(ring):.2f}, least {min(ring):.2f}"
    )


if __name__ == "__main__":
    run_settings("attention", (__doc__, __file__), as_rank, HEADER, cells, summary)
