"""`dshard plan` and `dshard explain`: predict costs before anything is launched."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace

from dshard.core.context import use_topology
from dshard.errors import MeshError
from dshard.explain import LEGEND, Report, describe_tensor, explain_matmul, explain_source, parse_dtype, read_layout
from dshard.redistribute import plan
from dshard.reshard import plan_reshard
from dshard.reshard.plan_rows import data_of
from dshard.tools import report
from dshard.tools.cli.arguments import (
    Commands,
    add_command,
    add_common,
    add_dtype,
    add_files,
    add_group,
    parse_mesh,
    parse_positive,
    parse_shape,
    planned_on,
    print_result,
    topology_data,
)
from dshard.tools.cli.model_commands import add_plan_model


def add_plan(commands: Commands) -> None:
    """Add the command to those of the parser."""
    kinds = add_group(commands, "plan", "what a choice costs, before anything is launched", title="what to plan")
    parser = add_command(kinds, "redistribute", "the steps from one layout of a tensor to another")
    parser.add_argument("--mesh", type=parse_mesh, required=True, metavar="AXES", help="such as 2x4 or dp=2,tp=4")
    _add_ends(parser, _plan_redistribute)
    _add_reshard(kinds)

    _add_matmul(kinds)
    add_plan_model(kinds)


def _add_reshard(kinds: Commands) -> None:
    summary = "who sends what to whom, and when, from a layout on one mesh to a layout on another"
    parser = add_command(kinds, "reshard", summary)
    parser.add_argument("--mesh", type=parse_mesh, required=True, metavar="AXES", help="of the source: dp=2,tp=4, say")
    parser.add_argument("--to-mesh", type=parse_mesh, required=True, metavar="AXES", help="the destination")
    parser.add_argument("--to-first", type=int, metavar="RANK", help="its first rank (the next after the source)")
    _add_ends(parser, _plan_reshard)


def _add_ends(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--shape", type=parse_shape, required=True, metavar="SIZES", help="such as 2048x2048")
    parser.add_argument("--from", dest="src", required=True, metavar="LAYOUT", help="such as 'dp:P(sum) tp:S(0)'")
    parser.add_argument("--to", dest="dst", required=True, metavar="LAYOUT", help="such as 'dp:S(0) tp:S(0)'")
    add_common(parser, command)
    add_files(parser)


def _add_matmul(kinds: Commands) -> None:
    summary = "every way to multiply m x k by k x n, the cheapest first; or those for given layouts"
    parser = add_command(kinds, "matmul", summary)
    for size, what in ("m", "rows of the result"), ("k", "what is summed over"), ("n", "columns of the result"):
        parser.add_argument(f"--{size}", type=parse_positive, required=True, metavar="N", help=what)
    parser.add_argument("--mesh", type=parse_mesh, required=True, metavar="AXES", help="such as 8x8x8 or dp=2,tp=4")
    for operand, size in ("a", "m x k"), ("b", "k x n"):
        parser.add_argument(f"--{operand}", metavar="LAYOUT", help=f"of the operand {size}, such as 'S(0) R R'")
    parser.add_argument("--one-copy", action="store_true", help="only where each tensor is stored once")
    add_dtype(parser)
    add_common(parser, _plan_matmul)
    add_files(parser)


def add_explain(commands: Commands) -> None:
    """Add the command to those of the parser."""
    summary = "the candidates for each operator of an expression or function, and why one is chosen"
    parser = add_command(commands, "explain", summary)
    parser.add_argument("source", metavar="WHAT", help="such as 'F.gelu(x @ w)', or file.py:function")
    parser.add_argument("--mesh", type=parse_mesh, metavar="AXES", help="of the tensors, such as 2x4 or dp=2,tp=4")
    parser.add_argument(
        "--tensor", action="append", default=[], metavar="TEXT", help="such as 'x: 4096x8192 S(0) R'; may be repeated"
    )
    add_dtype(parser)
    add_common(parser, _explain)
    add_files(parser)


def _plan_redistribute(arguments: argparse.Namespace) -> int:
    mesh = arguments.mesh
    topology, why = planned_on(arguments, mesh.size)
    src, dst = read_layout(arguments.src, mesh), read_layout(arguments.dst, mesh)
    with report.waiting("planning"):
        moved = plan(src, dst, arguments.shape, arguments.itemsize, topology)
    rows = report.plan_rows(moved, arguments.itemsize, topology)
    value = {"src": str(src), "dst": str(dst), "seconds": moved.seconds, "steps": rows}
    return print_result(
        arguments, value | topology_data(topology, why), report.plan_table(moved, arguments.itemsize, topology, why)
    )


def _plan_reshard(arguments: argparse.Namespace) -> int:
    source = arguments.mesh
    first = source.size if arguments.to_first is None else arguments.to_first
    target = replace(arguments.to_mesh, ranks=tuple(range(first, first + arguments.to_mesh.size)))
    topology, why = planned_on(arguments, max(*source.ranks, *target.ranks) + 1)
    src, dst = read_layout(arguments.src, source), read_layout(arguments.dst, target)
    with report.waiting("planning"):
        resharding = plan_reshard(src, dst, arguments.shape, arguments.itemsize, topology)
    value = data_of(resharding, topology) | topology_data(topology, why)
    return print_result(arguments, value, report.reshard_table(resharding, topology, why))


def _plan_matmul(arguments: argparse.Namespace) -> int:
    mesh = arguments.mesh
    topology, why = planned_on(arguments, mesh.size)
    a, b = (None if text is None else read_layout(text, mesh) for text in (arguments.a, arguments.b))
    sizes, dtype = (arguments.m, arguments.k, arguments.n), parse_dtype(arguments.dtype)
    with report.waiting("planning"):
        explanation = explain_matmul(*sizes, mesh, topology, a=a, b=b, dtype=dtype, one_copy=arguments.one_copy)
    explanation = replace(explanation, topology_why=why).top(arguments.top)
    table = report.explanation_table(explanation, LEGEND if a is None else "")
    return print_result(arguments, explanation.data(), table)


def _explain(arguments: argparse.Namespace) -> int:
    mesh, dtype = arguments.mesh, parse_dtype(arguments.dtype)
    if mesh is None and arguments.tensor:
        raise MeshError("--tensor needs the mesh on which it lies: give --mesh, as in --mesh 2x4")
    tensors = dict(describe_tensor(text, mesh, dtype) for text in arguments.tensor)
    if mesh is None and arguments.topology is None:
        with report.waiting("explaining"):
            explained = explain_source(arguments.source, tensors)
    else:
        topology, why = planned_on(arguments, 1 if mesh is None else mesh.size)
        with use_topology(topology), report.waiting("explaining"):
            explained = explain_source(arguments.source, tensors)
        explained = Report(tuple(replace(operator, topology_why=why) for operator in explained.operators))
    explained = explained.top(arguments.top)
    return print_result(arguments, json.loads(explained.to_json()), report.drawing_of(explained))
