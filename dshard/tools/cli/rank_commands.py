"""`dshard demo`, `dshard selftest` and `dshard topology`: commands that may start ranks."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from functools import partial

import torch

from dshard import launch
from dshard.errors import DShardError, MeshError
from dshard.mesh import Mesh
from dshard.tools import calibrate, demo, report, selftest
from dshard.tools.cli.arguments import (
    Commands,
    add_command,
    add_common,
    add_ranks,
    parse_mesh,
    parse_output,
    parse_positive,
    parse_seconds,
    print_result,
    ranks_and_device,
)
from dshard.topology import Topology

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
        print_result(arguments, {"rows": list(map(asdict, rows))}, report.demo_table(rows, settings))
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


def add_topology(commands: Commands) -> None:
    parser = add_command(commands, "topology", "the network and devices of a machine")
    parser.add_argument("--save", type=parse_output, metavar="FILE", help="write it as JSON, to be measured or edited")
    add_common(parser, _show_topology)
    kinds = parser.add_subparsers(title="other than showing one", metavar="command")
    summary = "measure the ranks that torchrun has started, or ranks of this host, with real collectives"
    parser = add_command(kinds, "measure", summary)
    add_ranks(parser)
    parser.add_argument(
        "--mesh", type=parse_mesh, metavar="AXES", help="such as 2x2 or dp=2,tp=2 (one axis of all ranks)"
    )
    parser.add_argument(
        "--seconds", type=parse_seconds, default=calibrate.SECONDS, metavar="S", help="default: %(default)s"
    )
    parser.add_argument("--out", type=parse_output, metavar="FILE", help="write it as JSON")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.set_defaults(command=_measure_topology)


def _show_topology(arguments: argparse.Namespace) -> int:
    topology = _topology(arguments)
    if arguments.save is not None:
        topology.save(arguments.save)
    return print_result(arguments, json.loads(topology.to_json()), report.topology_table(topology))


def _measure_topology(arguments: argparse.Namespace) -> int:
    requested, mesh = arguments.ranks, arguments.mesh
    if mesh is not None and requested not in (None, mesh.size):
        raise MeshError(f"the mesh ({mesh}) has {mesh.size} ranks, not {requested}: leave --ranks out")
    ranks, device = ranks_and_device(arguments, requested if mesh is None else mesh.size)
    mesh = replace(mesh or Mesh((ranks,)), device_type=device)
    with report.measure_progress(visible=launch.is_reporting()) as progress:
        work = partial(calibrate.measure_world, mesh, arguments.seconds)
        topology = launch.run(work, progress, ranks=ranks, device=device)
    if launch.is_reporting():
        if arguments.out is not None:
            topology.save(arguments.out)
        print_result(arguments, json.loads(topology.to_json()), report.measured_table(topology))
    return 0


def _topology(arguments: argparse.Namespace) -> Topology:
    """The topology of a preset's name, or of a file."""
    name: str = "cpu" if arguments.topology is None else arguments.topology
    return Topology.load(name) if name.endswith(".json") else Topology.preset(name, nodes=arguments.nodes or 1)
