"""`dshard topology`: the network and devices of a machine, shown or measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial

from dshard import launch
from dshard.errors import MeshError
from dshard.mesh import Mesh
from dshard.tools import calibrate, report
from dshard.tools.cli.arguments import (
    Commands,
    add_command,
    add_common,
    add_ranks,
    parse_mesh,
    parse_output,
    parse_seconds,
    print_result,
    ranks_and_device,
)
from dshard.topology import Topology


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
