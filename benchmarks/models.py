"""Measured regret of the cheapest plan: a training step under "auto" against every named plan, on real gloo ranks.

    PYTHONPATH=. python benchmarks/models.py [--ranks 4] [--netlab netlab.py] [--rate 200mbit] [--write]
        [--hidden 64] [--batch 16] | [--sweep]

The network is measured first, on the line of all ranks and on each folding of it, and all plans are made on what was
found. With --netlab (a program that runs ranks on emulated hosts with slow links, as root) the ranks are on two hosts.
--sweep runs several models and sizes, each beside the names that are predicted to be cheapest. Steps of all plans are
interleaved, round by round, so that a busy machine slows all alike; the figure of a plan is its median. The fastest
name is found in every other round, and compared with auto, round by round, in those between: of several plans that are
as fast, one is ahead by chance. The regret is how many times the step of that name auto takes, at least 1; a plan that
is one of the names runs once. Ranks have the ordinary scheduling policy: batch ranks wait for each message until
whatever else runs on the machine has had its slice of time. What other programs took of the cores meanwhile is told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from section import markdown_table, write_section
from torch import Tensor, nn

import dshard
from dshard import Mesh, Topology, parallelize, plan_model, use_topology
from dshard.calibrate import measure
from dshard.parallel import Auto, ModelPlan
from dshard.parallel.auto import names, unfoldings
from dshard.tables import text_table
from dshard.testing import RankPool

ROUNDS, WARM, HEADS = 40, 2, 4
SECONDS = 120
"""Of the processor, for the search: enough for it to end by itself, also where the ranks share two cores."""


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Adapted(nn.Module):
    """A layer that is not trained, with an adapter of low rank that is."""

    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(hidden, out).requires_grad_(False)
        self.a, self.b = nn.Linear(hidden, 8, bias=False), nn.Linear(8, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


def model(hidden: int, kind: str = "transformer") -> nn.Module:
    torch.manual_seed(0)
    if kind == "adapted":
        layers = [Adapted(32, hidden), nn.GELU(), Adapted(hidden, 4 * hidden), nn.GELU(), Adapted(4 * hidden, hidden)]
        return nn.Sequential(*layers)
    head = [nn.Linear(hidden, 64 * hidden)] if kind == "wide head" else []
    return nn.Sequential(nn.Linear(32, hidden), Layer(hidden), Layer(hidden), *head)


LONGEST = 2400
"""Seconds that a run may take."""
BESIDE = 6
"""The names that are predicted to be cheapest, and are measured, in a sweep."""
SWEEP = (
    *[("transformer", hidden, batch) for hidden, batch in ((64, 4), (64, 64), (256, 4), (256, 16))],
    *[("wide head", hidden, batch) for hidden, batch in ((64, 4), (64, 32), (128, 8))],
    *[("adapted", hidden, batch) for hidden, batch in ((64, 16), (256, 16), (256, 64))],
)
"""Models, hidden sizes and batches."""


def plans(ranks: int, hidden: int, batch: int, kind: str = "transformer", beside: int = 99) -> dict[str, ModelPlan]:
    """The cheapest plan, and the cheapest named ones on all unfoldings."""
    x, line = torch.empty(batch, 16, 32, device="meta"), Mesh((ranks,), ("x",))
    auto, found = plan_model(model(hidden, kind), line, Auto(seconds=SECONDS), x), {}
    for mesh in unfoldings(line):
        for name in names(mesh.ndim):
            with suppress(dshard.StrategyError):  # more ranks than heads
                found[f"{name} ({mesh})"] = plan_model(model(hidden, kind), mesh, name, x)
    found.pop(f"{auto.strategy} ({auto.mesh})", None)
    cheapest = sorted(found.items(), key=lambda each: each[1].cost.seconds)
    return {"auto": auto, **dict(cheapest[:beside])}


def topology_of(meshes: dict[Mesh, dshard.DeviceMesh], seconds: float) -> Topology | None:
    """The network as measured on the line and on its unfoldings, so many seconds each."""
    found = None
    for mesh in meshes.values():
        found = measure(mesh, base=found, seconds=seconds)
    return found


def as_rank(settings: Sequence[tuple[str, int, int]], calibrate: float) -> list[dict[str, Any]]:
    """Seconds of a step under each plan, measured and predicted, and what auto took, in each setting."""
    take_turns()
    line = Mesh((dist.get_world_size(),), ("x",))
    meshes = {m: dshard.init_device_mesh("cpu", m.shape, mesh_dim_names=m.names) for m in unfoldings(line)}
    beside = 99 if len(settings) == 1 else BESIDE
    with use_topology(topology_of(meshes, calibrate)):
        return [in_setting(line, meshes, each, beside) for each in settings]


def take_turns() -> None:
    """Give this process one torch thread and the ordinary scheduling policy."""
    torch.set_num_threads(1)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def in_setting(
    line: Mesh, meshes: dict[Mesh, dshard.DeviceMesh], setting: tuple[str, int, int], beside: int
) -> dict[str, Any]:
    """What is found of one model, hidden size and batch."""
    kind, hidden, batch = setting
    found = [plans(line.size, hidden, batch, kind, beside)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(found)  # made once
    (found,) = found
    took = measured(found, meshes, setting)
    auto, (fastest, times) = found["auto"], compared(took.seconds)
    return {
        "setting": f"{kind}, {hidden}, batch {batch}",
        "seconds": {name: statistics.median(seconds) for name, seconds in took.seconds.items()},
        "quartiles": {name: statistics.quantiles(seconds)[::2] for name, seconds in took.seconds.items()},
        "predicted": {name: plan.cost.seconds for name, plan in found.items() if plan.cost},
        "auto": f"{auto.strategy} on ({auto.mesh})",
        "fastest": fastest,
        "times": times,
        "regret": max(1.0, 1 / times),
        "others": took.others,
    }


def compared(seconds: dict[str, list[float]]) -> tuple[str, float]:
    """The fastest name of every other round, and how many times auto's step it takes in those between, their median."""
    fastest = min(seconds.keys() - {"auto"}, key=lambda name: statistics.median(seconds[name][::2]))
    pairs = zip(seconds[fastest][1::2], seconds["auto"][1::2], strict=True)
    return fastest, statistics.median([best / auto for best, auto in pairs])


class Took(NamedTuple):
    """Seconds of the slowest rank in each round under each plan, and the cores that other programs took meanwhile."""

    seconds: dict[str, list[float]]
    others: float | None


def measured(found: dict[str, ModelPlan], meshes: dict[Mesh, dshard.DeviceMesh], setting: tuple[str, int, int]) -> Took:
    """Time steps under each plan, one of each in a round."""
    kind, hidden, batch = setting
    x = torch.randn(batch, 16, 32, generator=torch.Generator().manual_seed(0))
    laid = {name: parallelize(model(hidden, kind), meshes[plan.mesh], plan) for name, plan in found.items()}
    times: dict[str, list[float]] = {name: [] for name in laid}
    started, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    for _ in range(ROUNDS + WARM):
        for name, laid_model in laid.items():
            dist.barrier()
            begin = time.perf_counter()
            laid_model(x).square().mean().backward()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    ours = torch.tensor(time.process_time() - own, dtype=torch.float64)
    dist.all_reduce(ours)
    now, took_all = busy_seconds(), time.perf_counter() - started
    others = None if busy is None or now is None else max(0.0, now - busy - ours.item()) / took_all
    took = torch.tensor([seconds[WARM:] for seconds in times.values()], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return Took(dict(zip(times, took.tolist(), strict=True)), others)


def busy_seconds() -> float | None:
    """Seconds that programs have had on all cores, without those of interrupts; None where the system does not say."""
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    except OSError:
        return None
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def on_hosts(netlab: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same on two emulated hosts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = (
            f"run --sched other --hosts 2 --ranks {args.ranks // 2} --rate {args.rate} --show rank0 --timeout {LONGEST}"
        )
        own = [f"--hidden={args.hidden}", f"--batch={args.batch}", f"--calibrate={args.calibrate}"]
        own += ["--sweep"] * args.sweep
        command = [
            sys.executable,
            netlab,
            *options.split(),
            "--",
            sys.executable,
            __file__,
            *own,
            "--rank",
            str(result),
        ]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "0"})  # alike on all ranks
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found


def join_and_run(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    found = as_rank(settings_of(args), args.calibrate)
    if dist.get_rank() == 0:
        Path(args.rank).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="in all")
    parser.add_argument("--netlab", metavar="FILE", help="the program that emulates hosts")
    parser.add_argument("--rate", default="200mbit", help="of the links between hosts")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sweep", action="store_true", help="several models and sizes")
    parser.add_argument("--calibrate", type=float, default=10.0, metavar="SECONDS", help="of each mesh")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.rank:
        join_and_run(args)
        return
    if args.netlab:
        found = on_hosts(args.netlab, args)
    else:
        with RankPool(args.ranks, timeout=LONGEST) as pool:
            found = pool.run(as_rank, settings_of(args), args.calibrate)[0]
    if args.json:
        print(json.dumps(found))
        return
    where = f"two hosts, {args.rate} links" if args.netlab else "one host"
    header, rows, said = of_sweep(found) if args.sweep else of_one(found[0])
    print(text_table(header, rows))
    print(said := f"{args.ranks} ranks on {where}; {said}")
    if args.write:
        name = "models sweep" * args.sweep or "models"
        write_section(f"{name} netlab" if args.netlab else name, f"{markdown_table(header, rows)}\n\n{said}")


def settings_of(args: argparse.Namespace) -> Sequence[tuple[str, int, int]]:
    return SWEEP if args.sweep else [("transformer", args.hidden, args.batch)]


def of_one(found: dict[str, Any]) -> tuple[list[str], list[list[str]], str]:
    """All plans of one setting, the fastest first."""
    rows = [
        [name, f"{found['predicted'][name] * 1e3:.2f}", f"{took * 1e3:.2f}"]
        for name, took in sorted(found["seconds"].items(), key=lambda pair: pair[1])
    ]
    said = f"auto is {found['auto']}; regret {found['regret']:.2f}; {what_else_ran([found])}"
    return ["plan", "predicted ms", "measured ms"], rows, said


def of_sweep(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]], str]:
    """Auto and the fastest name in each setting."""
    rows = []
    for each in found:
        auto, best = (_ms(each, name) for name in ("auto", each["fastest"]))
        rows.append([each["setting"], each["auto"], auto, each["fastest"], best, f"{each['times']:.2f}"])
    regrets = [each["regret"] for each in found]
    said = f"regret of auto: median {statistics.median(regrets):.2f}, worst {max(regrets):.2f}; {what_else_ran(found)}"
    return ["model, width", "auto", "ms (quartiles)", "fastest name", "ms (quartiles)", "name / auto"], rows, said


def _ms(found: dict[str, Any], name: str) -> str:
    """The median of a plan in milliseconds, and its quartiles."""
    first, last = found["quartiles"][name]
    return f"{found['seconds'][name] * 1e3:.1f} ({first * 1e3:.0f} to {last * 1e3:.0f})"


def what_else_ran(found: Sequence[dict[str, Any]]) -> str:
    """What else ran on the machine."""
    others = [each["others"] for each in found if each["others"] is not None]
    if not others:
        return "what else ran is not known"
    return f"other programs took {statistics.mean(others):.1f} of {os.cpu_count()} cores meanwhile"


if __name__ == "__main__":
    main()
