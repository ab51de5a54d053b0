"""`dshard selftest`: check that dshard works on this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from dshard import launch
from dshard.tools import report, selftest
from dshard.tools.cli.arguments import Commands, add_command, add_ranks, print_result, ranks_and_device


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
