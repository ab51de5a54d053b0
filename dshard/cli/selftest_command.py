"""`dshard selftest`: whether dshard works on this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from dshard import launch, report, selftest
from dshard.cli.arguments import Commands, add_command, parse_positive, print_result


def add_selftest(commands: Commands) -> None:
    summary = "check dshard on this machine: collectives, products, training steps, checkpoints"
    parser = add_command(commands, "selftest", summary)
    parser.add_argument(
        "--ranks", type=parse_positive, metavar="N", help="how many ranks to start (4, or one for each GPU)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the results for machines")
    parser.set_defaults(command=_selftest)


def _selftest(arguments: argparse.Namespace) -> int:
    """Exit code 1 where a check fails."""
    ranks = launch.choose_ranks(arguments.ranks, arguments.device)
    device = launch.choose_device(arguments.device, ranks)
    with report.measure_progress(launch.is_reporting(), "checking") as tell:
        tested = selftest.run(device, ranks, tell)
    if launch.is_reporting():
        value = {"machine": tested.machine, "results": [asdict(result) for result in tested.results]}
        print_result(arguments, value, report.selftest_table(tested))
        if tested.failed:
            report.error(report.selftest_failures(tested))
    return int(bool(tested.failed))
