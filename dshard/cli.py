"""The command line: arguments -> one call of the library -> a report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from dshard import __version__, demo, report
from dshard.errors import DShardError
from dshard.layout import parse_layout
from dshard.mesh import Mesh
from dshard.parallel.search import Transformer, rank_meshes
from dshard.redistribute import plan
from dshard.topology import PRESETS, Topology

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

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


def _plan_redistribute(arguments: argparse.Namespace) -> int:
    mesh, topology = arguments.mesh, _topology(arguments)
    src, dst = parse_layout(arguments.src, mesh), parse_layout(arguments.dst, mesh)
    moved = plan(src, dst, arguments.shape, arguments.itemsize, topology)
    if arguments.json:
        rows = report.plan_rows(moved, arguments.itemsize, topology)
        report.data({"src": str(src), "dst": str(dst), "seconds": moved.seconds, "steps": rows})
    else:
        report.show(report.plan_table(moved, arguments.itemsize, topology))
    return 0


def _plan_mesh(arguments: argparse.Namespace) -> int:
    topology = _topology(arguments)
    transformer = Transformer(arguments.hidden, arguments.tokens, arguments.layers, itemsize=arguments.itemsize)
    choices = rank_meshes(arguments.devices, topology, transformer)
    if arguments.json:
        rows = [{"mesh": list(c.mesh.shape), "name": c.name, "seconds": c.seconds, "nbytes": c.nbytes} for c in choices]
        report.data({"topology": topology.name, "rows": rows})
    else:
        report.show(report.meshes_table(choices, topology))
    return 0


def _show_topology(arguments: argparse.Namespace) -> int:
    topology = _topology(arguments)
    if arguments.save is not None:
        topology.save(arguments.save)
    if arguments.json:
        report.data(json.loads(topology.to_json()))
    else:
        report.show(report.topology_table(topology))
    return 0


def _topology(arguments: argparse.Namespace) -> Topology:
    """A preset by name, or a file."""
    name: str = arguments.topology
    return Topology.load(name) if name.endswith(".json") else Topology.preset(name, nodes=arguments.nodes)


def _strategies(asked: list[str] | None) -> list[str]:
    return demo.names() if asked is None or "all" in asked else asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dshard", description="Declarative sharding for PyTorch.")
    parser.add_argument("--version", action="version", version=f"dshard {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_topology(commands)
    return parser


def _add_plan(commands: Commands) -> None:
    summary = "what a choice costs, before anything is launched"
    kinds = commands.add_parser("plan", help=summary, description=_sentence(summary)).add_subparsers(
        title="what to plan", metavar="kind", required=True
    )
    summary = "the steps from one layout of a tensor to another"
    parser = kinds.add_parser("redistribute", help=summary, description=_sentence(summary))
    parser.add_argument("--mesh", type=_mesh, required=True, metavar="AXES", help="such as dp=2,tp=4")
    parser.add_argument("--shape", type=_shape, required=True, metavar="SIZES", help="such as 2048x2048")
    parser.add_argument("--from", dest="src", required=True, metavar="LAYOUT", help="such as 'dp:P(sum) tp:S(0)'")
    parser.add_argument("--to", dest="dst", required=True, metavar="LAYOUT", help="such as 'dp:S(0) tp:S(0)'")
    _add_common(parser, _plan_redistribute)

    summary = "meshes of two axes for the layers of a transformer, the cheapest first"
    parser = kinds.add_parser("mesh", help=summary, description=_sentence(summary))
    parser.add_argument("--devices", type=_positive, required=True, metavar="N")
    parser.add_argument("--hidden", type=_positive, required=True, metavar="N", help="width of the model")
    parser.add_argument("--tokens", type=_positive, required=True, metavar="N", help="tokens in a batch")
    parser.add_argument("--layers", type=_positive, default=1, metavar="N", help="default: %(default)s")
    _add_common(parser, _plan_mesh)


def _add_topology(commands: Commands) -> None:
    summary = "the network and devices of a machine"
    parser = commands.add_parser("topology", help=summary, description=_sentence(summary))
    parser.add_argument("--save", metavar="FILE", help="write it as JSON, to be measured or edited")
    _add_common(parser, _show_topology)


def _add_common(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    known = ", ".join(PRESETS)
    parser.add_argument("--topology", default="cpu", metavar="NAME", help=f"a .json file, or one of {known} (cpu)")
    parser.add_argument("--nodes", type=_positive, default=1, metavar="N", help="how many of these machines (1)")
    parser.add_argument("--itemsize", type=_positive, default=2, metavar="N", help="bytes of one element (2)")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.set_defaults(command=command)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _mesh(text: str) -> Mesh:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh: write its axes like dp=2,tp=4")
    return Mesh(tuple(int(size) for _, _, size in pairs), tuple(name for name, _, _ in pairs))


def _shape(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split("x")):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write its sizes like 2048x2048")
    return tuple(map(int, text.split("x")))


def _add_demo(commands: Commands) -> None:
    summary = "train a small vision transformer under several layouts and compare every loss"
    parser = commands.add_parser("demo", help=summary, description=_sentence(summary))
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
