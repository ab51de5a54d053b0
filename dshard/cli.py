"""The command line: arguments -> one call of the library -> a report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from dshard import __version__, calibrate, demo, launch, report
from dshard.errors import DShardError, MeshError
from dshard.explain import (
    LEGEND,
    Report,
    describe_tensor,
    explain_matmul,
    explain_source,
    parse_dtype,
    read_layout,
)
from dshard.mesh import Mesh
from dshard.ops import use_topology
from dshard.parallel.search import Transformer, rank_meshes
from dshard.redistribute import plan
from dshard.topology import PRESETS, Topology, default_topology

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

AUTO = "auto"
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
    ranks = launch.choose_ranks(arguments.ranks, arguments.device)
    device = launch.choose_device(arguments.device, ranks)
    settings = demo.Settings(
        strategies=_strategies(arguments.strategy, ranks, device, DTYPES[arguments.dtype]),
        ranks=ranks,
        steps=arguments.steps,
        dtype=DTYPES[arguments.dtype],
        seed=arguments.seed,
        device=device,
    )
    with report.demo_progress(settings, visible=launch.reporting()) as tell:
        rows = demo.run(settings, tell)
    if launch.reporting():
        if arguments.plot is not None:
            arguments.plot.write_text(demo.draw(rows))
        if arguments.json:
            report.data(report.demo_data(rows))
        else:
            report.show(report.demo_table(rows, settings))
    return 0


def _plan_redistribute(arguments: argparse.Namespace) -> int:
    mesh = arguments.mesh
    topology, why = _planned_on(arguments, mesh.size)
    src, dst = read_layout(arguments.src, mesh), read_layout(arguments.dst, mesh)
    moved = plan(src, dst, arguments.shape, arguments.itemsize, topology)
    rows = report.plan_rows(moved, arguments.itemsize, topology)
    value = {"src": str(src), "dst": str(dst), "seconds": moved.seconds, "steps": rows}
    return _told(arguments, value | _named(topology, why), report.plan_table(moved, arguments.itemsize, topology, why))


def _plan_mesh(arguments: argparse.Namespace) -> int:
    topology, why = _planned_on(arguments, arguments.devices)
    transformer = Transformer(arguments.hidden, arguments.tokens, arguments.layers, itemsize=arguments.itemsize)
    choices = rank_meshes(arguments.devices, topology, transformer)
    rows = [{"mesh": list(c.mesh.shape), "name": c.name, "seconds": c.seconds, "nbytes": c.nbytes} for c in choices]
    return _told(arguments, _named(topology, why) | {"rows": rows}, report.meshes_table(choices, topology, why))


def _plan_matmul(arguments: argparse.Namespace) -> int:
    mesh = arguments.mesh
    topology, why = _planned_on(arguments, mesh.size)
    a, b = (None if text is None else read_layout(text, mesh) for text in (arguments.a, arguments.b))
    sizes, dtype = (arguments.m, arguments.k, arguments.n), parse_dtype(arguments.dtype)
    found = explain_matmul(*sizes, mesh, topology, a=a, b=b, dtype=dtype, one_copy=arguments.one_copy)
    found = replace(found, topology_why=why).top(arguments.top)
    return _told(arguments, found.data(), report.explanation_table(found, LEGEND if a is None else ""))


def _explain(arguments: argparse.Namespace) -> int:
    mesh, dtype = arguments.mesh, parse_dtype(arguments.dtype)
    if mesh is None and arguments.tensor:
        raise MeshError("--tensor needs the mesh on which it lies: give --mesh, as in --mesh 2x4")
    tensors = dict(describe_tensor(text, mesh, dtype) for text in arguments.tensor)
    if mesh is None and arguments.topology is None:
        found = explain_source(arguments.source, tensors)
    else:
        topology, why = _planned_on(arguments, 1 if mesh is None else mesh.size)
        with use_topology(topology):
            found = explain_source(arguments.source, tensors)
        found = Report(tuple(replace(operator, topology_why=why) for operator in found.operators))
    found = found.top(arguments.top)
    return _told(arguments, json.loads(found.to_json()), report.drawn(found))


def _told(arguments: argparse.Namespace, value: object, table: report.Drawing) -> int:
    """Print a value, and write the files that were asked for."""
    if arguments.json:
        report.data(value)
    else:
        report.show(table)
    for form in ("html", "svg"):
        if getattr(arguments, form) is not None:
            report.export(table, getattr(arguments, form), form=form)
    return 0


def _named(topology: Topology, why: str) -> dict[str, str]:
    return {"topology": topology.name, "network": str(topology), "topology_why": why}


def _planned_on(arguments: argparse.Namespace, ranks: int) -> tuple[Topology, str]:
    """The topology to plan on, and how it came to be used: a file or preset, of as many nodes as these ranks need."""
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


def _show_topology(arguments: argparse.Namespace) -> int:
    topology = _topology(arguments)
    if arguments.save is not None:
        topology.save(arguments.save)
    if arguments.json:
        report.data(json.loads(topology.to_json()))
    else:
        report.show(report.topology_table(topology))
    return 0


def _measure_topology(arguments: argparse.Namespace) -> int:
    asked, mesh = arguments.ranks, arguments.mesh
    if mesh is not None and asked not in (None, mesh.size):
        raise MeshError(f"the mesh ({mesh}) has {mesh.size} ranks, not {asked}: leave --ranks out")
    ranks = launch.choose_ranks(mesh.size if mesh is not None else asked, arguments.device)
    device = launch.choose_device(arguments.device, ranks)
    mesh = replace(mesh or Mesh((ranks,)), device_type=device)
    with report.measure_progress(visible=launch.reporting()) as tell:
        work = partial(calibrate.measure_world, mesh, arguments.seconds)
        topology = launch.run(work, tell, ranks=ranks, device=device)
    if launch.reporting():
        if arguments.out is not None:
            topology.save(arguments.out)
        if arguments.json:
            report.data(json.loads(topology.to_json()))
        else:
            report.show(report.measured_table(topology))
    return 0


def _topology(arguments: argparse.Namespace) -> Topology:
    """A preset by name, or a file."""
    name: str = arguments.topology or "cpu"
    return Topology.load(name) if name.endswith(".json") else Topology.preset(name, nodes=arguments.nodes or 1)


def _strategies(asked: list[str] | None, ranks: int, device: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Those asked for; none for all of them. For "auto", the one that is predicted to communicate the shortest time."""
    if asked is None or "all" in asked:
        return ()
    if AUTO not in asked:
        return tuple(asked)
    ranked = demo.rank(ranks, demo.BATCH, device, dtype)
    if launch.reporting():
        report.note(report.predictions(ranked))
    return tuple(ranked[0].strategy if name == AUTO else name for name in asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dshard", description="Declarative sharding for PyTorch.")
    parser.add_argument("--version", action="version", version=f"dshard {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_explain(commands)
    _add_topology(commands)
    return parser


def _add_plan(commands: Commands) -> None:
    summary = "what a choice costs, before anything is launched"
    kinds = commands.add_parser("plan", help=summary, description=_sentence(summary)).add_subparsers(
        title="what to plan", metavar="kind", required=True
    )
    summary = "the steps from one layout of a tensor to another"
    parser = kinds.add_parser("redistribute", help=summary, description=_sentence(summary))
    parser.add_argument("--mesh", type=_mesh, required=True, metavar="AXES", help="such as 2x4 or dp=2,tp=4")
    parser.add_argument("--shape", type=_shape, required=True, metavar="SIZES", help="such as 2048x2048")
    parser.add_argument("--from", dest="src", required=True, metavar="LAYOUT", help="such as 'dp:P(sum) tp:S(0)'")
    parser.add_argument("--to", dest="dst", required=True, metavar="LAYOUT", help="such as 'dp:S(0) tp:S(0)'")
    _add_common(parser, _plan_redistribute)
    _add_files(parser)

    summary = "meshes of two axes for the layers of a transformer, the cheapest first"
    parser = kinds.add_parser("mesh", help=summary, description=_sentence(summary))
    parser.add_argument("--devices", type=_positive, required=True, metavar="N")
    parser.add_argument("--hidden", type=_positive, required=True, metavar="N", help="width of the model")
    parser.add_argument("--tokens", type=_positive, required=True, metavar="N", help="tokens in a batch")
    parser.add_argument("--layers", type=_positive, default=1, metavar="N", help="default: %(default)s")
    _add_common(parser, _plan_mesh)
    _add_files(parser)
    _add_matmul(kinds)


def _add_matmul(kinds: Commands) -> None:
    summary = "every way to multiply m x k by k x n, the cheapest first; or those for given layouts"
    parser = kinds.add_parser("matmul", help=summary, description=_sentence(summary))
    for size in "mkn":
        parser.add_argument(f"--{size}", type=_positive, required=True, metavar="N")
    parser.add_argument("--mesh", type=_mesh, required=True, metavar="AXES", help="such as 8x8x8 or dp=2,tp=4")
    for operand, size in ("a", "m x k"), ("b", "k x n"):
        parser.add_argument(f"--{operand}", metavar="LAYOUT", help=f"of the operand {size}, such as 'S(0) R R'")
    parser.add_argument("--one-copy", action="store_true", help="only where each tensor is stored once")
    _add_dtype(parser)
    _add_common(parser, _plan_matmul)
    _add_files(parser)


def _add_explain(commands: Commands) -> None:
    summary = "the candidates for each operator of an expression or function, and why one is chosen"
    parser = commands.add_parser("explain", help=summary, description=_sentence(summary))
    parser.add_argument("source", metavar="WHAT", help="such as 'F.gelu(x @ w)', or file.py:function")
    parser.add_argument("--mesh", type=_mesh, metavar="AXES", help="of the tensors, such as 2x4 or dp=2,tp=4")
    parser.add_argument(
        "--tensor", action="append", default=[], metavar="TEXT", help="such as 'x: 4096x8192 S(0) R'; may be repeated"
    )
    _add_dtype(parser)
    _add_common(parser, _explain)
    _add_files(parser)


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", metavar="NAME", help="such as fp32 or int64; default: %(default)s")
    parser.add_argument(
        "--top", type=_positive, default=12, metavar="N", help="how many candidates to show; default: %(default)s"
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    for form in ("html", "svg"):
        parser.add_argument(f"--{form}", metavar="FILE", help=f"write the table as {form.upper()} too")


def _add_topology(commands: Commands) -> None:
    summary = "the network and devices of a machine"
    parser = commands.add_parser("topology", help=summary, description=_sentence(summary))
    parser.add_argument("--save", metavar="FILE", help="write it as JSON, to be measured or edited")
    _add_common(parser, _show_topology)
    kinds = parser.add_subparsers(title="other than showing one", metavar="command")
    summary = "measure the ranks that torchrun has started, or ranks of this host, with real collectives"
    parser = kinds.add_parser("measure", help=summary, description=_sentence(summary))
    parser.add_argument("--ranks", type=_positive, metavar="N", help="how many ranks to start (4, or one for each GPU)")
    parser.add_argument(
        "--mesh", type=_any_mesh, metavar="AXES", help="such as 2x2 or dp=2,tp=2 (one axis of all ranks)"
    )
    parser.add_argument("--seconds", type=_seconds, default=calibrate.SECONDS, metavar="S", help="default: %(default)s")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--out", metavar="FILE", help="write it as JSON")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.set_defaults(command=_measure_topology)


def _add_common(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    known = ", ".join(PRESETS)
    parser.add_argument("--topology", metavar="NAME", help=f"a .json file, or one of {known}")
    parser.add_argument("--nodes", type=_positive, metavar="N", help="how many of these machines")
    parser.add_argument("--itemsize", type=_positive, default=2, metavar="N", help="bytes of one element (2)")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.set_defaults(command=command)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _mesh(text: str) -> Mesh:
    if all(size.isdecimal() for size in text.split("x")):
        return Mesh(tuple(map(int, text.split("x"))))
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh: write its axes like 2x4 or dp=2,tp=4")
    return Mesh(tuple(int(size) for _, _, size in pairs), tuple(name for name, _, _ in pairs))


def _any_mesh(text: str) -> Mesh:
    return _mesh(text) if "=" in text else Mesh(_shape(text))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return seconds


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
        help="may be repeated; all, auto for the one predicted to communicate the shortest time, or one of "
        + ", ".join(name.replace(" ", "-") for name in demo.names()),
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses of all strategies as an SVG")
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
        return text if text in ("all", AUTO) else demo.find(text).name
    except DShardError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
