"""Arguments shared by several commands: their types, and the printing of results."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TypeAlias

import torch

from dshard import launch
from dshard.errors import MeshError
from dshard.mesh import MAX_RANKS, Mesh
from dshard.tools import report
from dshard.tools.report.console import Drawing
from dshard.topology import PRESETS, Topology, default_topology

LARGEST = 1 << 48
"""The largest number that an option takes; a larger one is a mistake."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def print_result(arguments: argparse.Namespace, value: object, table: Drawing) -> int:
    """Print a table, or its value as JSON, and write the files that were asked for; return the exit code."""
    if arguments.json:
        report.data(value)
    else:
        report.show(table)
    for form in ("html", "svg"):
        if getattr(arguments, form, None) is not None:
            report.export(table, getattr(arguments, form), form=form)
    return 0


def topology_data(topology: Topology, why: str) -> dict[str, str]:
    """Return a topology's name and network, and why it is used, as JSON values."""
    return {"topology": topology.name, "network": str(topology), "topology_why": why}


def planned_on(arguments: argparse.Namespace, ranks: int) -> tuple[Topology, str]:
    """Return the topology to plan on and why it is used: a file, or a preset with enough nodes for `ranks`."""
    name, nodes = arguments.topology, arguments.nodes
    if name is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        inside = None if nodes in (None, 1) or ranks % nodes else ranks // nodes
        hosts = "" if inside is None else f" with {inside} on each of {nodes} hosts"
        return default_topology(
            device, inside
        ), f"the default for {device} ranks{hosts}; choose another with --topology"
    if name.endswith(".json"):
        return Topology.load(name), f"read from {name}"
    size = Topology.preset(name).size
    if nodes is not None or size is None:
        return Topology.preset(name, nodes=nodes or 1), "as given"
    needed = -(-ranks // size)
    why = "as given" if needed == 1 else f"as given; {needed} nodes hold the {ranks} ranks"
    return Topology.preset(name, nodes=needed), why


def add_common(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int], *, itemsize: bool = True
) -> None:
    """Add the arguments that all planning commands share; `itemsize` for those whose tensors have no dtype."""
    known = ", ".join(PRESETS)
    parser.add_argument("--topology", metavar="NAME", help=f"a .json file, or one of {known}")
    parser.add_argument("--nodes", type=parse_positive, metavar="N", help="how many of these machines")
    if itemsize:
        parser.add_argument("--itemsize", type=parse_positive, default=2, metavar="N", help="bytes of one element (2)")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.set_defaults(command=command)


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options that name files to write the table to."""
    for form in ("html", "svg"):
        parser.add_argument(
            f"--{form}", type=parse_output, metavar="FILE", help=f"write the table as {form.upper()} too"
        )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the options for a dtype, and for the number of candidates to show."""
    parser.add_argument("--dtype", default="bf16", metavar="NAME", help="such as fp32 or int64; default: %(default)s")
    parser.add_argument(
        "--top", type=parse_positive, default=12, metavar="N", help="how many candidates to show; default: %(default)s"
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that starts ranks: how many, and on what device; see `ranks_and_device`."""
    parser.add_argument(
        "--ranks", type=parse_positive, metavar="N", help="how many ranks to start (4, or one for each GPU)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")


def ranks_and_device(arguments: argparse.Namespace, ranks: int | None, share_gpus: bool = False) -> tuple[int, str]:
    """Return the number of ranks to start, chosen if `ranks` is None, and their device."""
    ranks = launch.choose_ranks(ranks, arguments.device)
    return ranks, launch.choose_device(arguments.device, ranks, share_gpus)


class Help(argparse.HelpFormatter):
    """Help whose usage fits narrow terminals: argparse indents it by the whole command, however long."""

    def format_help(self) -> str:
        """The help, its usage indented less where a line would be too long."""
        usage, blank, rest = super().format_help().partition("\n\n")
        first, *lines = usage.splitlines() or [""]
        if max(map(len, [first, *lines])) > shutil.get_terminal_size().columns:
            usage = "\n".join([first, *(f"    {line.strip()}" for line in lines)])
        return usage + blank + rest


def add_command(commands: Commands, name: str, summary: str, description: str | None = None) -> argparse.ArgumentParser:
    """Add a command with its summary, and a description where that is another."""
    description = f"{summary[0].upper()}{summary[1:]}." if description is None else description
    return commands.add_parser(name, help=summary, description=description, formatter_class=Help)


def add_group(commands: Commands, name: str, summary: str, title: str) -> Commands:
    """Add a command with subcommands, and return the object to add these to."""
    parser = add_command(commands, name, summary)
    return parser.add_subparsers(title=title, metavar="kind", required=True)


def parse_mesh(text: str) -> Mesh:
    """A mesh such as 2x4 or dp=2,tp=4."""
    try:
        return _mesh(text)
    except MeshError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _mesh(text: str) -> Mesh:
    if all(size.isdecimal() for size in text.split("x")):
        return Mesh(tuple(map(int, text.split("x"))))
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh: write its axes like 2x4 or dp=2,tp=4")
    return Mesh(tuple(int(size) for _, _, size in pairs), tuple(name for name, _, _ in pairs))


def parse_output(text: str) -> Path:
    """A file to write to, refused before what is to be written there is computed."""
    path = Path(text)
    directory = path.absolute().parent
    if not launch.is_reporting():  # another rank writes it, perhaps on another host
        return path
    if not directory.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no directory {str(directory)!r}")
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file to write to, but a directory: give the name of a file")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission; give another file")
    return path


def number_of(text: str, is_right: Callable[[float], bool], wanted: str, unit: str = "") -> float:
    """The finite number that `text` is before the unit, if it is a right one; else the error says what is `wanted`."""
    with suppress(ValueError):
        number = float(text.removesuffix(unit))
        if isfinite(number) and is_right(number):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is {wanted}")


def parse_seconds(text: str) -> float:
    """Seconds above zero."""
    return number_of(text, lambda n: n > 0, "not a number of seconds above zero")


def parse_amount(text: str) -> float:
    """Seconds or bytes, zero or more."""
    return number_of(text, lambda n: n >= 0, "not a number of at least zero")


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape such as 2048x2048."""
    if not all(part.isdecimal() for part in text.split("x")):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write its sizes like 2048x2048")
    return tuple(map(_not_too_large, text.split("x")))


def parse_positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return _not_too_large(text)


def parse_devices(text: str) -> int:
    """A number of devices that a mesh can have."""
    devices = parse_positive(text)
    if devices > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{devices:,} devices are too many: a mesh has at most {MAX_RANKS:,} ranks")
    return devices


def _not_too_large(text: str) -> int:
    if int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is too large: give at most {LARGEST:,}")
    return int(text)
