"""Regret over a sweep of rates between two hosts: `python benchmarks/matmul.py --sweep --netlab netlab.py --json FILE`.

At each rate the topology is measured, and each case of `matmul_cases.py` is chosen for and run in three shapes. All
candidates run in turn; the slow ones are dropped, and the choice runs beside its two nearest rivals. The regret is the
median, over turns, of the time of the choice over that of the rival that is ahead; 1 where none is. What crosses the
NIC of a host is counted by the kernel.

Each product is a line of FILE as soon as it is known, and is not run again: a sweep that was stopped goes on there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from matmul_cases import CASES, Candidate, Case, Product, product_of
from section import markdown_table

from dshard import use_topology
from dshard.calibrate import measure
from dshard.comm import bind, init_device_mesh, runtime_of
from dshard.launch.processes import share_cores
from dshard.tools.calibrate.rounds import Clock

RATES = (50, 100, 200, 450, 1000, 2000)
"""Mbit/s of each host's NIC."""
MEASURING, LIMIT = 14.0, 125.0
"""Seconds to measure the topology at each rate; seconds until a rate begins no more products."""
LEAST_TURNS, MOST_TURNS, RIVALS = 5, 25, 2
SLOW = (2.0, 1.3)
"""Candidates that took more than so many times the fastest are dropped after the first turn, and after the second."""
SMALLER = ((2, 2, 2), (4, 4, 4), (2, 4, 8))
"""The three shapes of a case: its sizes m, k and n, over these."""
NIC = Path("/sys/class/net/eth0/statistics")


@dataclass(frozen=True)
class Outcome:
    """One product at one rate: the choice, its nearest rival, and the ratio of their times over turns, choice to rival.

    Bytes are those that crossed the NIC of a host in its busier direction; `priced` are the seconds that were promised.
    """

    rate: int
    case: str
    sizes: tuple[int, int, int]
    chosen: str
    rival: str
    seconds: float
    ratio: float
    quartiles: tuple[float, float]
    turns: int
    nic_bytes: tuple[int, int]
    priced: tuple[float, float]

    @property
    def regret(self) -> float:
        """The time of the choice over that of the best candidate."""
        return max(1.0, self.ratio)


def products() -> Iterator[Case]:
    """All cases in all shapes."""
    for case in CASES:
        for by in SMALLER:
            m, k, n = (size // part for size, part in zip(case.sizes, by, strict=True))
            yield replace(case, sizes=(m, k, n))


# -- on every rank


def sweep_rank(rate: int, path: str, done: Sequence[int]) -> None:
    """Run the products that are not `done`, until the time is over; rank 0 writes each to the file."""
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    share_cores()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = bind(device_mesh)
    clock = Clock(mesh, runtime_of(mesh))  # type: ignore[arg-type]  # there are processes
    topology = measure(mesh, seconds=MEASURING)
    left = [case for i, case in enumerate(products()) if i not in set(done)]
    with use_topology(topology), torch.no_grad():
        for i, case in enumerate(left):
            (now,) = clock.slowest([clock.elapsed()])
            if now > LIMIT:
                break
            outcome = compared(rate, case, product_of(case, device_mesh), clock, (LIMIT - now) / (len(left) - i))
            if dist.get_rank() == 0:
                with Path(path).open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def compared(rate: int, case: Case, ours: Product, clock: Clock, seconds: float) -> Outcome:
    """The choice beside its nearest rivals, in about so many seconds; every rank finds the same."""
    begin, chosen = clock.elapsed(), ours.candidates[ours.chosen]
    rivals = rivals_of(ours, clock)
    runs = [chosen, *rivals]
    times: list[list[float]] = [[] for _ in runs]
    while len(times[0]) < MOST_TURNS:
        order = range(len(runs)) if len(times[0]) % 2 else reversed(range(len(runs)))
        mine = {i: clock.seconds(runs[i].run) for i in order}
        *took, now = clock.slowest([*(mine[i] for i in range(len(runs))), clock.elapsed() - begin])
        for each, time in zip(times, took, strict=True):
            each.append(time)
        if len(times[0]) >= LEAST_TURNS and now > seconds:
            break
    ratios = [[a / b for a, b in zip(times[0], other, strict=True)] for other in times[1:]]
    ahead = max(range(len(rivals)), key=lambda i: median(ratios[i]))
    low, middle, high = quantiles(ratios[ahead], n=4)
    pair = (chosen, rivals[ahead])
    crossed = [bytes_on_nic(each.run, clock) for each in pair]
    return Outcome(
        rate,
        case.name,
        case.sizes,
        chosen.name,
        rivals[ahead].name,
        median(times[0]),
        middle,
        (low, high),
        len(times[0]),
        (crossed[0], crossed[1]),
        (pair[0].strategy.seconds, pair[1].strategy.seconds),
    )


def rivals_of(ours: Product, clock: Clock) -> list[Candidate]:
    """The fastest candidates but for the choice, by two turns, of which the second leaves out the slow ones."""
    alive, least = list(ours.candidates.values()), dict.fromkeys(ours.candidates, float("inf"))
    for slow in SLOW:
        took = clock.slowest([clock.seconds(each.run) for each in alive])
        for each, seconds in zip(alive, took, strict=True):
            least[each.name] = min(least[each.name], seconds)
        fastest = min(least.values())
        alive = [each for each in alive if least[each.name] <= slow * fastest or each.name == ours.chosen]
    others = sorted((name for name in ours.candidates if name != ours.chosen), key=least.__getitem__)
    return [ours.candidates[name] for name in others[:RIVALS]]


def bytes_on_nic(run: Callable[[], object], clock: Clock) -> int:
    """The bytes that cross the NIC of some host while all ranks run, in its busier direction; 0 where there is none."""
    clock.slowest([0.0])
    before = nic_counts()
    clock.seconds(run)
    clock.slowest([0.0])
    crossed = max((after - old for after, old in zip(nic_counts(), before, strict=True)), default=0)
    return int(clock.slowest([crossed])[0])


def nic_counts() -> list[int]:
    """The bytes that this host has sent and received since it was started."""
    return [int((NIC / name).read_text()) for name in ("tx_bytes", "rx_bytes") if NIC.exists()]


# -- on the machine that starts them


def run_sweep(program: str, netlab: str, path: Path, rates: Sequence[int] = RATES) -> list[Outcome]:
    """What is known after every rate has run what the file lacks; `program` gives its `--rank` to `sweep_rank`."""
    every = list(products())
    for rate in rates:
        known = {(each.case, each.sizes) for each in outcomes(path) if each.rate == rate}
        done = [i for i, case in enumerate(every) if (case.name, case.sizes) in known]
        if len(done) == len(every):
            continue
        options = f"run --hosts 2 --ranks 2 --rate {rate}mbit --show rank0 --timeout {LIMIT + 60:.0f}".split()
        request = json.dumps(["sweep", rate, str(path.resolve()), done])
        subprocess.run([sys.executable, netlab, *options, "--", sys.executable, program, "--rank", request], check=True)
        print(f"{rate} Mbit/s: {sum(each.rate == rate for each in outcomes(path))} of {len(every)}", file=sys.stderr)
    return outcomes(path)


def outcomes(path: Path) -> list[Outcome]:
    """The lines of a file, in the order of `RATES`; none where there is no file."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        for name in ("sizes", "quartiles", "nic_bytes", "priced"):
            line[name] = tuple(line[name])
    return sorted((Outcome(**line) for line in lines), key=lambda each: each.rate)


RATES_HEADER = ("Mbit/s", "products", "median", "upper quartile", "worst", "above 1.03", "above 1.25")
WORST_HEADER = ("Mbit/s", "case", "m, k, n", "chosen", "ms", "best", "regret", "quartiles", "MiB on the NIC")
SHOWN = 12


def tables(found: Sequence[Outcome]) -> str:
    """Regrets by rate, and the products of the largest, as Markdown."""
    rates = [rate for rate in RATES if any(each.rate == rate for each in found)]
    rows = [regrets_row(str(rate), [each for each in found if each.rate == rate]) for rate in rates]
    rows.append(regrets_row("all", found))
    worst = sorted(found, key=lambda each: -each.regret)[:SHOWN]
    return "\n\n".join(
        [
            markdown_table(RATES_HEADER, rows),
            "The largest, choice and best side by side in the last column:",
            markdown_table(WORST_HEADER, [outcome_row(each) for each in worst if each.regret > 1.0]),
        ]
    )


def regrets_row(name: str, found: Sequence[Outcome]) -> list[str]:
    regrets = sorted(each.regret for each in found)
    upper = regrets[(3 * len(regrets)) // 4]
    above = [sum(regret > most for regret in regrets) for most in (1.03, 1.25)]
    figures = [f"{median(regrets):.2f}", f"{upper:.2f}", f"{regrets[-1]:.2f}"]
    return [name, str(len(regrets)), *figures, *map(str, above)]


def outcome_row(each: Outcome) -> list[str]:
    sizes, nic = ", ".join(map(str, each.sizes)), " / ".join(f"{count / 2**20:.2f}" for count in each.nic_bytes)
    quartiles = "{:.2f} to {:.2f}".format(*each.quartiles)
    figures = [f"{each.seconds * 1e3:.1f}", each.rival, f"{each.regret:.2f}", quartiles, nic]
    return [str(each.rate), each.case, sizes, each.chosen, *figures]
