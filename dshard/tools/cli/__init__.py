"""The command line: arguments -> one call of the library -> a report."""

from __future__ import annotations

import argparse
import errno
import gc
import signal
import sys
from collections.abc import Sequence

import torch

from dshard.errors import DShardError
from dshard.tools import report
from dshard.tools.cli.arguments import Help, add_group
from dshard.tools.cli.completion import add_completion
from dshard.tools.cli.pipeline_commands import add_simulate_pipeline
from dshard.tools.cli.plan_commands import add_explain, add_plan, add_simulate_step
from dshard.tools.cli.rank_commands import add_demo, add_selftest, add_topology
from dshard.version import __version__


def script() -> int:
    """Run one command as its own process and return the exit code; nothing is freed before the process ends."""
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # importing dshard left it to the system
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to do
        if "triton" in sys.modules:  # which would tell of all that it has as leaks; to free it takes half a second
            gc.unfreeze()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        parser, words = _parser(), sys.argv[1:] if argv is None else argv
        for word in words:
            if word.startswith("--") and word.endswith("=--"):  # argparse makes an empty list of this value
                parser.error(f"{word}: give a value after the =")
        arguments = parser.parse_args(words)
        status: int = arguments.command(arguments)
    except DShardError as error:
        report.error(str(error))
        return 1
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        report.error(f"{error.filename or 'stdout'}: {error.strerror}")
        if error.filename is None:
            report.drop_output()
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dshard", description="Declarative sharding for PyTorch.", formatter_class=Help
    )
    parser.add_argument("--version", action="version", version=f"dshard {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    add_demo(commands)
    add_selftest(commands)
    add_plan(commands)
    add_explain(commands)
    add_topology(commands)
    what = "what a training step or a pipeline would do, before it is launched"
    kinds = add_group(commands, "simulate", what, title="what to simulate")
    add_simulate_step(kinds)
    add_simulate_pipeline(kinds)
    add_completion(commands, parser)
    return parser
