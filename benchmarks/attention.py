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

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from section import markdown_table, write_section
from settings import Rows, Setting, choice_cells, in_turns, join_and_run, left_to_run, run_setting
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

import dshard
from dshard import DTensor, Replicate, Shard, StrategyError, explain, trace, use_strategy, use_topology
from dshard.calibrate import measure, typical
from dshard.comm import DeviceMesh, bind, init_device_mesh, runtime_of
from dshard.core.observe import Decision, observing
from dshard.launch.processes import share_cores
from dshard.rules.attention_loops import AttentionLoops
from dshard.tables import text_table
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
SETTINGS = (
    Setting("one host", None, 16, 4),
    Setting("2 hosts, 800mbit", "800mbit", 16, 3),
    Setting("2 hosts, 300mbit", "300mbit", 18, 3),
)


# -- on every rank


def as_rank(seconds: float, turns: int) -> Rows:
    """All cases; the same rows on every rank."""
    warnings.simplefilter("ignore")
    share_cores()
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    folded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    topology = measure(bind(folded), seconds=seconds)  # the groups of all four are those of the line, too
    with use_topology(topology):
        return [run_case(case, line if len(case.axes) == 1 else folded, turns) for case in CASES]


def run_case(case: Case, device_mesh: DeviceMesh, turns: int) -> dict[str, Any]:
    """One case, by all loops, and by the choice beside the gathered form and torch's ring."""
    mesh = bind(device_mesh)
    torch.manual_seed(0)
    shapes = (case.heads, case.queries), (case.key_heads, case.keys), (case.key_heads, case.keys)
    given = [torch.randn(1, heads, n, case.size) for heads, n in shapes]
    operands = [_distributed(x, device_mesh).requires_grad_(case.backward) for x in given]
    call = partial(_attention, operands, case)
    clock = Clock(mesh, runtime_of(mesh))  # type: ignore[arg-type]  # there are processes
    runs: dict[str, Callable[[], object]] = {}
    names: dict[object, str] = {}
    predicted: dict[str, float] = {}
    for loops in _all_loops(mesh.ndim, case.causal):
        with suppress(StrategyError), use_strategy(attention=loops):
            name = " ".join(map(str, loops))
            if names.setdefault(_decided(call), name) == name:
                runs[name] = partial(_with, loops, call)
                predicted[name] = explain(partial(_forward, operands, case)).chosen.seconds
    chosen = names.setdefault(_decided(call), "none")
    runs.setdefault(chosen, call)
    times = in_turns(runs, clock, turns, SECONDS)
    pair = {"chosen": call, "gathered": runs[" ".join("q" * mesh.ndim)]}
    ring = torch_ring(given, case, dist.group.WORLD)
    beside = in_turns(pair if ring is None else pair | {"torch": ring}, clock, turns, SECONDS_BESIDE)
    best = min(times, key=lambda name: typical(times[name]))
    with trace() as sent:
        call()
    price = explain(partial(_forward, operands, case)).chosen
    return {
        "case": str(case),
        "chosen": chosen,
        "best": best,
        "strategies": len(times),
        "seconds": typical(times[chosen]),
        "least": typical(times[best]),
        "regret": typical(times[chosen]) / typical(times[best]),
        "received": clock.slowest([sum(event.nbytes for event in sent.events)])[0],
        "bound": price.bound_ratio,
        "gathered": _ratio(beside["gathered"], beside["chosen"]),
        "torch": _ratio(beside["torch"], beside["chosen"]) if ring is not None else None,
        "times": {name: typical(each) for name, each in times.items()},
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


def _with(loops: AttentionLoops, call: Callable[[], object]) -> object:
    with use_strategy(attention=loops):
        return call()


def _decided(call: Callable[[], object]) -> object:
    """What is decided within `call`: choices alike in this are the same here."""
    found: list[Decision] = []
    with observing(found.append):
        call()
    strategy = next(each.strategy for each in found if each.op == "attention")
    assert strategy is not None
    return strategy.name, strategy.rows, strategy.inputs


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


def _ratio(times: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Of neighbouring turns: the lower quartile, the median, and the upper one."""
    low, middle, high = quantiles([a / b for a, b in zip(times, base, strict=True)], n=4)
    return low, middle, high


# -- on the machine that starts them


HEADER = (
    *("ranks", "case", "chosen", "ms", "fastest of", "ms", "regret", "MiB received", "x bound"),
    *("gathered / chosen", "torch's ring / chosen"),
)


def cells(name: str, row: dict[str, Any]) -> list[str]:
    return [
        *choice_cells(name, row),
        f"{row['received'] / 2**20:.2f}",
        "-" if row["bound"] is None else f"{row['bound']:.2f}",
        *("-" if row[other] is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*row[other]) for other in OTHERS),
    ]


OTHERS = ("gathered", "torch")


def summary(name: str, rows: Rows) -> str:
    """The regret, and how much slower the others are, in one line."""
    regrets = [row["regret"] for row in rows]
    gathered, ring = ([row[other][1] for row in rows if row[other] is not None] for other in OTHERS)
    return (
        f"{name}: regret median {median(regrets):.2f}, worst {max(regrets):.2f}; gathered / chosen geometric mean "
        f"{geometric_mean(gathered):.2f}, most {max(gathered):.2f}; torch's ring / chosen geometric mean "
        f"{geometric_mean(ring):.2f}, least {min(ring):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", metavar="FILE", help="the program that emulates hosts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all rows here, and run what it lacks")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--only", type=int, metavar="N", help="the N-th setting alone, from 0")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _, *given = json.loads(options.rank)
        join_and_run(as_rank, *given)
        return
    found: dict[str, Rows] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    for setting in left_to_run(SETTINGS, options.only, found):
        result = run_setting(setting, options.netlab, as_rank, __file__)
        if result is not None:
            found[setting.name] = result
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    table = [cells(name, row) for name, rows in found.items() for row in rows]
    lines = [summary(name, rows) for name, rows in found.items()]
    print(text_table(HEADER, table), *lines, sep="\n")
    if options.write:
        write_section("attention", "\n\n".join([*lines, markdown_table(HEADER, table)]))


if __name__ == "__main__":
    main()
