"""Operators of loops in several settings: their choice beside all loops and beside other programs, as a table."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, Protocol, TypeVar

from section import markdown_table, write_section
from settings import AsRank, Rows, Setting, choice_cells, join_and_run, left_to_run, run_setting

from dshard import StrategyError, explain, trace, use_strategy, use_topology
from dshard.calibrate import measure, typical
from dshard.comm import DeviceMesh, bind, init_device_mesh
from dshard.core.observe import Decision, observing
from dshard.launch.processes import share_cores
from dshard.tables import text_table
from dshard.tools.calibrate.rounds import Clock

SETTINGS = (
    Setting("one host", None, 16, 9),
    Setting("2 hosts, 800mbit", "800mbit", 16, 9),
    Setting("2 hosts, 300mbit", "300mbit", 18, 9),
)


class OnAxes(Protocol):
    """A case, and the mesh axes of the four ranks on which it runs."""

    @property
    def axes(self) -> tuple[str, ...]: ...


C = TypeVar("C", bound=OnAxes)


# -- on every rank


def run_cases(
    cases: Sequence[C], run_case: Callable[[C, DeviceMesh, int], dict[str, Any]], seconds: float, turns: int
) -> Rows:
    """All cases, under the topology measured in so many seconds; the same rows on every rank."""
    warnings.simplefilter("ignore")
    share_cores()
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    folded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    topology = measure(bind(folded), seconds=seconds)  # the groups of all four are those of the line, too
    with use_topology(topology):
        return [run_case(case, line if len(case.axes) == 1 else folded, turns) for case in cases]


def decided(op: str, call: Callable[[], object]) -> object:
    """What is decided for the operator `op` within `call`: choices alike in this are the same here."""
    found: list[Decision] = []
    with observing(found.append):
        call()
    strategy = next(each.strategy for each in found if each.op == op)
    assert strategy is not None
    return strategy.name, strategy.rows, strategy.inputs


def by_all_loops(
    op: str, every: Iterable[tuple[Any, ...]], call: Callable[[], object], forward: Callable[[], object]
) -> tuple[str, dict[str, Callable[[], object]], dict[str, float]]:
    """The name of what is chosen for `call`, and by name each choice of loops: how it runs, and predicted seconds.

    `forward` is the part of `call` that is the operator `op`. Of loops that come to the same only the first are there.
    """
    runs: dict[str, Callable[[], object]] = {}
    names: dict[object, str] = {}
    predicted: dict[str, float] = {}
    for loops in every:
        with suppress(StrategyError), _asked(op, loops):
            name = " ".join(map(str, loops))
            if names.setdefault(decided(op, forward), name) == name:
                runs[name] = partial(_with, op, loops, call)
                predicted[name] = explain(forward).chosen.seconds
    chosen = names.setdefault(decided(op, forward), "none")
    runs.setdefault(chosen, call)
    return chosen, runs, predicted


def _with(op: str, loops: tuple[Any, ...], call: Callable[[], object]) -> object:
    with _asked(op, loops):
        return call()


def _asked(op: str, loops: tuple[Any, ...]) -> AbstractContextManager[None]:
    options: dict[str, Any] = {op: loops}
    return use_strategy(**options)


def choice_row(
    case: object, chosen: str, times: dict[str, list[float]], clock: Clock, call: Callable[[], object]
) -> dict[str, Any]:
    """What a case found of its choice: its seconds, those of the fastest, the regret, and what it receives."""
    best = min(times, key=lambda name: typical(times[name]))
    with trace() as sent:
        call()
    return {
        "case": str(case),
        "chosen": chosen,
        "best": best,
        "strategies": len(times),
        "seconds": typical(times[chosen]),
        "least": typical(times[best]),
        "regret": typical(times[chosen]) / typical(times[best]),
        "received": clock.slowest([sum(event.nbytes for event in sent.events)])[0],
        "times": {name: typical(each) for name, each in times.items()},
    }


def ratio(times: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Of neighbouring turns: the lower quartile, the median, and the upper one."""
    low, middle, high = quantiles([a / b for a, b in zip(times, base, strict=True)], n=4)
    return low, middle, high


# -- on the machine that starts them


def ratio_cell(row: dict[str, Any], other: str) -> str:
    """The median and the quartiles of another program's time over that of the choice; "-" if it did not run."""
    return "-" if row[other] is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*row[other])


def run_settings(
    section: str,
    texts: tuple[str, str],
    as_rank: AsRank,
    header: Sequence[str],
    cells: Callable[[dict[str, Any]], list[str]],
    summary: Callable[[Rows], str],
) -> None:
    """Run a script, of whose `texts` the first is its docstring and the second its file, as its options say.

    `cells` are those of a row behind what was chosen, `summary` says in one line what a setting found, and `section` is
    the part of docs/benchmarks.md for both.
    """
    description, script = texts
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        result = run_setting(setting, options.netlab, as_rank, script)
        if result is not None:
            found[setting.name] = result
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    show_rows(section, found, header, cells, summary, writes=options.write)


def show_rows(
    section: str,
    found: dict[str, Rows],
    header: Sequence[str],
    cells: Callable[[dict[str, Any]], list[str]],
    summary: Callable[[Rows], str],
    *,
    writes: bool,
) -> None:
    """Print the table and a line for each setting; with `writes` they become a section of docs/benchmarks.md, too."""
    table = [[*choice_cells(name, row), *cells(row)] for name, rows in found.items() for row in rows]
    lines = [f"{name}: {summary(rows)}" for name, rows in found.items()]
    print(text_table(header, table), *lines, sep="\n")
    if writes:
        write_section(section, "\n\n".join([*lines, markdown_table(header, table)]))
