"""`dshard demo` and `dshard selftest`: commands that start ranks."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from dshard import launch
from dshard.errors import DShardError
from dshard.tools import demo, report, selftest
from dshard.tools.cli.arguments import (
    Commands,
    add_command,
    add_ranks,
    parse_output,
    parse_positive,
    print_result,
    ranks_and_device,
)

AUTO = "auto"
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def add_demo(commands: Commands) -> None:
    summary = "train a small vision transformer under several layouts and compare every loss"
    parser = add_command(commands, "demo", summary)
    defaults = demo.Settings()
    add_ranks(parser)
    parser.add_argument(
        "--steps", type=parse_positive, metavar="N", default=defaults.steps, help="default: %(default)s"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    parser.add_argument(
        "--strategy",
        action="append",
        type=_strategy,
        metavar="NAME",
        help="may be repeated; all, auto for the one predicted to communicate the shortest time, or one of "
        + ", ".join(name.replace(" ", "-") for name in demo.names()),
    )
    parser.add_argument("--plot", type=parse_output, metavar="FILE", help="draw the losses of all strategies as an SVG")
    parser.add_argument("--seed", type=int, metavar="N", default=defaults.seed, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the rows for machines")
    parser.set_defaults(command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    ranks, device = ranks_and_device(arguments, arguments.ranks)
    settings = demo.Settings(
        strategies=_strategies(arguments.strategy, ranks, device, DTYPES[arguments.dtype]),
        ranks=ranks,
        steps=arguments.steps,
        dtype=DTYPES[arguments.dtype],
        seed=arguments.seed,
        device=device,
    )
    with report.demo_progress(settings, visible=launch.is_reporting()) as progress:
        rows = demo.run(settings, progress)
    if launch.is_reporting():
        if arguments.plot is not None:
            arguments.plot.write_text(demo.draw(rows))
        print_result(arguments, report.demo_data(rows), report.demo_table(rows, settings))
    return 0


def _strategies(names: list[str] | None, ranks: int, device: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the strategies to train, () for all; "auto" becomes the one with the least predicted communication."""
    if names is None or "all" in names:
        return ()
    if AUTO not in names:
        return tuple(names)
    ranked = demo.rank(ranks, demo.BATCH, device, dtype)
    if launch.is_reporting():
        report.note(report.predictions(ranked))
    return tuple(ranked[0].strategy if name == AUTO else name for name in names)


def _strategy(text: str) -> str:
    try:
        return text if text in ("all", AUTO) else demo.find(text).name
    except DShardError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_selftest(commands: Commands) -> None:
    summary = "check dshard on this machine: collectives, products, training steps, checkpoints"
    parser = add_command(commands, "selftest", summary)
    add_ranks(parser)
    parser.add_argument("--json", action="store_true", help="print the results for machines")
    parser.set_defaults(command=_selftest)


def _selftest(arguments: argparse.Namespace) -> int:
    """Run the self-test and print its results; exit code 1 if a check fails."""
    ranks, device = ranks_and_device(arguments, arguments.ranks, share_gpus=True)
    with report.measure_progress(launch.is_reporting(), "checking") as progress:
        tested = selftest.run(device, ranks, progress)
    if launch.is_reporting():
        value = {"machine": tested.machine, "results": [asdict(result) for result in tested.results]}
        print_result(arguments, value, report.selftest_table(tested))
        if tested.failed:
            report.error(report.selftest_failures(tested))
    return int(bool(tested.failed))
