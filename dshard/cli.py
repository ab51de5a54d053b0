"""The command line: arguments -> one call of the library -> a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from dshard import __version__, demo, report
from dshard.errors import DShardError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except DShardError as error:
        report.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _demo(arguments: argparse.Namespace) -> int:
    ranks = demo.choose_ranks(arguments.ranks, arguments.device)
    settings = demo.Settings(
        strategies=tuple(_strategies(arguments.strategy)),
        ranks=ranks,
        steps=arguments.steps,
        dtype=DTYPES[arguments.dtype],
        seed=arguments.seed,
        device=demo.choose_device(arguments.device, ranks),
    )
    with report.demo_progress(settings, visible=demo.reporting()) as tell:
        rows = demo.run(settings, tell)
    if demo.reporting():
        if arguments.json:
            report.data(report.demo_data(rows))
        else:
            report.show(report.demo_table(rows, settings))
    return 0


def _strategies(asked: list[str] | None) -> list[str]:
    return demo.names() if asked is None or "all" in asked else asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dshard", description="Declarative sharding for PyTorch.")
    parser.add_argument("--version", action="version", version=f"dshard {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "train a small vision transformer under several layouts and compare every loss"
    parser = commands.add_parser("demo", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    defaults = demo.Settings()
    parser.add_argument("--ranks", type=_positive, metavar="N", help="how many ranks to start (4, or one for each GPU)")
    parser.add_argument("--steps", type=_positive, metavar="N", default=defaults.steps, help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    parser.add_argument(
        "--strategy",
        action="append",
        type=_strategy,
        metavar="NAME",
        help=f"may be repeated; all, or one of {', '.join(name.replace(' ', '-') for name in demo.names())}",
    )
    parser.add_argument("--seed", type=int, metavar="N", default=defaults.seed, help="default: %(default)s")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the rows for machines")
    parser.set_defaults(command=_demo)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _strategy(text: str) -> str:
    try:
        return text if text == "all" else demo.find(text).name
    except DShardError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
