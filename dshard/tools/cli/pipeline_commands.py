"""`dshard simulate pipeline`: the timeline of a pipeline, before it is launched."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from dshard.errors import ScheduleError
from dshard.pipeline import (
    SCHEDULES,
    Choice,
    Costs,
    Edge,
    EdgeCost,
    Program,
    StageCost,
    chain,
    choose,
    rank_schedules,
    simulate,
)
from dshard.tools import report
from dshard.tools.cli.arguments import Commands, add_command, parse_amount, parse_output, parse_positive, print_result
from dshard.tools.report.console import columns
from dshard.tools.report.timelines import schedules_table, simulation_table

AUTO, ALL = "auto", "all"
MOST_PASSES = 100_000
"""Forward passes that are simulated: stages times microbatches."""


def add_simulate_pipeline(kinds: Commands) -> None:
    """Add `pipeline` to what can be simulated."""
    summary = "when each stage of a pipeline computes, how long it idles, and what it holds"
    parser = add_command(kinds, "pipeline", summary)
    parser.add_argument("--stages", type=parse_positive, required=True, metavar="N", help="how many")
    parser.add_argument("--microbatches", type=parse_positive, required=True, metavar="N", help="how many")
    names = ", ".join(SCHEDULES)
    parser.add_argument(
        "--schedule",
        default=AUTO,
        metavar="NAME",
        help=f"{names}, all to compare them, or auto for the fastest that fits (default)",
    )
    for name, default, what in (
        ("forward", "1", "of one microbatch"),
        ("backward-input", "1", "for gradients of inputs"),
        ("backward-weight", "1", "for gradients of weights"),
    ):
        parser.add_argument(
            f"--{name}", type=_numbers, default=default, metavar="S", help=f"seconds {what}: one, or one for each stage"
        )
    parser.add_argument("--send", type=parse_amount, default=0.0, metavar="S", help="seconds for a value to cross (0)")
    parser.add_argument(
        "--latency", type=parse_amount, default=0.0, metavar="S", help="seconds for one byte to cross (0)"
    )
    parser.add_argument(
        "--skip", type=_skip, action="append", default=[], metavar="I-J", help="a value from stage I to J; repeatable"
    )
    parser.add_argument("--delay", type=int, metavar="N", help="split the backward; weights N microbatches later")
    parser.add_argument("--no-overlap", action="store_true", help="stages wait for what they send")
    for name, what in (
        ("activation", "held of a microbatch from its forward on"),
        ("kept", "of these still needed for gradients of weights"),
        ("fixed", "of parameters, gradients and optimizer"),
    ):
        parser.add_argument(f"--{name}", type=_numbers, default="0", metavar="BYTES", help=f"bytes {what}")
    parser.add_argument("--budget", type=parse_positive, metavar="BYTES", help="memory of a rank, for auto and all")
    parser.add_argument("--trace", type=parse_output, metavar="FILE", help="write the timeline as a Chrome trace")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.set_defaults(command=_simulate_pipeline)


def _simulate_pipeline(arguments: argparse.Namespace) -> int:
    if arguments.stages * arguments.microbatches > MOST_PASSES:
        raise ScheduleError(
            f"{arguments.stages:,} stages of {arguments.microbatches:,} microbatches: simulate at most {MOST_PASSES:,} "
            "pairs of them, so give fewer"
        )
    edges = chain(arguments.stages) + tuple(Edge("skip", src, dst) for src, dst in arguments.skip)
    costs = _costs(arguments, edges)
    delays = (None, 0, 1) if arguments.delay is None else (arguments.delay,)
    if arguments.schedule == ALL:
        with report.waiting("simulating"):
            ranked = rank_schedules(costs, arguments.microbatches, edges, delays)
        return print_result(arguments, list(map(_figures, ranked)), schedules_table(ranked, arguments.budget))
    if arguments.schedule == AUTO:
        with report.waiting("simulating"):
            choice = choose(costs, arguments.microbatches, edges, arguments.budget, delays)
    else:
        n, m, overlap = arguments.stages, arguments.microbatches, not arguments.no_overlap
        program = Program(arguments.schedule, n, m, edges, arguments.delay, overlap)
        choice = Choice(program, simulate(program, costs))
    if arguments.trace is not None:
        arguments.trace.write_text(choice.timeline.to_chrome())
    return print_result(arguments, _figures(choice) | choice.timeline.data(), simulation_table(choice, columns()))


def _figures(choice: Choice) -> dict[str, Any]:
    program, timeline = choice.program, choice.timeline
    return {
        "schedule": program.schedule,
        "delay": program.delay,
        "overlap": program.overlap,
        "makespan": timeline.makespan,
        "signal_makespan": simulate(program, timeline.costs.signals()).makespan,
        "peak_bytes": choice.peak_bytes,
    }


def _costs(arguments: argparse.Namespace, edges: Sequence[Edge]) -> Costs:
    n = arguments.stages
    seconds = [_each(arguments, name, n) for name in ("forward", "backward_input", "backward_weight")]
    nbytes = [map(int, _each(arguments, name, n)) for name in ("activation", "kept", "fixed")]
    stages = tuple(StageCost(*one) for one in zip(*seconds, *nbytes, strict=True))
    return Costs(stages, tuple(EdgeCost(edge, arguments.send, 0, arguments.latency) for edge in edges))


def _each(arguments: argparse.Namespace, name: str, n: int) -> list[float]:
    numbers: list[float] = getattr(arguments, name)
    if len(numbers) not in (1, n):
        raise ScheduleError(f"--{name.replace('_', '-')} has {len(numbers)} numbers for {n} stages: give one, or {n}")
    return numbers * n if len(numbers) == 1 else numbers


def _numbers(text: str) -> list[float]:
    return [parse_amount(part) for part in text.split(",")]


def _skip(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+-\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of stages: write it like 0-3")
    src, dst = text.split("-")
    return int(src), int(dst)
