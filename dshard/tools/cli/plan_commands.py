"""`dshard plan`, `dshard explain` and `dshard simulate step`: predict costs before anything is launched."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn

from dshard.core.context import use_topology
from dshard.errors import DShardError, MeshError, NotationError, ShapeError
from dshard.explain import (
    LEGEND,
    Report,
    describe_tensor,
    explain_matmul,
    explain_source,
    load_function,
    parse_dtype,
    read_layout,
)
from dshard.mesh import Mesh
from dshard.parallel import Precision, plan_model, plan_table
from dshard.parallel.integrations.config_models import WAY_OUT, model_of_config, read_config
from dshard.parallel.plan_files import mesh_of, plan_of
from dshard.parallel.plan_table import with_efficiency
from dshard.parallel.step_price import StepPrices
from dshard.redistribute import plan
from dshard.reshard import plan_reshard
from dshard.reshard.reshard_plan import data_of
from dshard.routing import Routing
from dshard.step_timeline import chrome_trace
from dshard.tools import report
from dshard.tools.cli.arguments import (
    Commands,
    add_command,
    add_common,
    add_dtype,
    add_files,
    add_group,
    number_of,
    parse_devices,
    parse_mesh,
    parse_output,
    parse_positive,
    parse_seconds,
    parse_shape,
    planned_on,
    print_result,
    topology_data,
)
from dshard.tools.report import SHOWN, plans_data, plans_table
from dshard.topology import Topology
from dshard.topology.presets import EFFICIENCY
from dshard.validate import article, as_tuple


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


_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def add_plan_model(kinds: Commands) -> None:
    """Add `model` to what can be planned."""
    parser = add_command(kinds, "model", "strategies to lay out a model on devices, the fastest that fit first")
    parser.add_argument("--devices", type=parse_devices, required=True, metavar="N", help="how many")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help="of each device (the preset's)")
    names = "a name as parallelize has it, on every folding, or planned; repeatable (those that are common)"
    parser.add_argument("--strategy", action="append", default=[], metavar="NAME", help=names)
    parser.add_argument("--seconds", type=parse_seconds, default=40.0, metavar="N", help="to price plans in (40)")
    parser.add_argument("--top", type=parse_positive, default=SHOWN, metavar="N", help=f"how many to show ({SHOWN})")
    parser.add_argument("--out", type=parse_output, metavar="FILE", help="write the fastest as a plan, for parallelize")
    _add_model(parser)
    add_common(parser, _plan_model, itemsize=False)
    add_files(parser)


def add_simulate_step(kinds: Commands) -> None:
    """Add `step` to what can be simulated."""
    summary = "a training step of a model: seconds, bytes and memory by module, before it is launched"
    parser = add_command(kinds, "step", summary)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="one that plan model wrote, in place of the next two")
    parser.add_argument("--strategy", default="fsdp", metavar="NAME", help="as parallelize has it; default: fsdp")
    parser.add_argument("--mesh", type=parse_mesh, default=Mesh((8,)), metavar="SIZES", help="such as 64x8 (8)")
    parser.add_argument("--trace", type=parse_output, metavar="FILE", help="write the timeline as a Chrome trace")
    _add_model(parser)
    add_common(parser, _simulate_step, itemsize=False)
    add_files(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = "a Hugging Face config.json, or file.py:function of yours that returns a module, or it and a batch"
    parser.add_argument("--model", required=True, metavar="FILE", help=model)
    parser.add_argument("--batch", type=parse_positive, required=True, metavar="N", help="sequences of a step")
    parser.add_argument("--sequence", type=parse_positive, default=4096, metavar="N", help="tokens of one (4096)")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME", help="of the products; default: %(default)s")
    spread = "how experts get tokens: uniform, zipf:S, or a .json file with a number of each expert"
    parser.add_argument("--routing", type=parse_routing, metavar="HOW", help=spread)
    share = "the share of the stated rate that products reach (what is known of the device, or 1)"
    parser.add_argument("--efficiency", type=parse_share, metavar="SHARE", help=share)


def _plan_model(arguments: argparse.Namespace) -> int:
    topology, why = planned_on(arguments, arguments.devices)
    efficiency, source = _efficiency(arguments, topology)
    with report.waiting("reading the model"):
        model, args, kwargs = model_and_batch(arguments.model, arguments.batch, arguments.sequence)
    with report.search_progress() as progress, _told_of_config(arguments):
        plans = plan_table(
            model,
            arguments.devices,
            topology,
            args,
            kwargs,
            strategies=arguments.strategy,
            memory=arguments.memory,
            precision=_precision(arguments),
            routing=arguments.routing,
            efficiency=efficiency,
            dtype=str(parse_dtype(arguments.dtype)).removeprefix("torch."),
            seconds=arguments.seconds,
            progress=progress,
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(plans.plans[0].data(), indent=2) + "\n")
    said = f"products at {efficiency:.0%} of the peak{source}"
    value = plans_data(plans, arguments.top) | {"efficiency": efficiency} | topology_data(topology, why)
    return print_result(arguments, value, plans_table(plans, why, arguments.top, said))


def _efficiency(arguments: argparse.Namespace, topology: Topology) -> tuple[float, str]:
    """The share of their rate that products reach, and who says so."""
    if arguments.efficiency is not None:
        return arguments.efficiency, ""
    share, source = EFFICIENCY.get(topology.device.name, (1.0, ""))
    return share, f": {source}" if source else ""


def _precision(arguments: argparse.Namespace) -> Precision | None:
    """Products in the dtype that was asked for; weights, gradients and moments in single precision."""
    dtype = parse_dtype(arguments.dtype)
    return None if dtype == torch.float32 else Precision(dtype, torch.float32)


def model_and_batch(source: str, batch: int, sequence: int) -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
    """The model of a config.json, or that a function makes, and a batch for it: of tokens, or as the function says.

    Raises:
        ShapeError: a file that is no configuration, or one that is not understood.
        NotationError: no such function, or one that makes no module.
    """
    tokens = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    if _is_config(source):
        return model_of_config(read_config(source)), (), {"input_ids": tokens, "labels": tokens}
    path, _, name = source.rpartition(":")
    with torch.device("meta"):
        made = load_function(path, name)()
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, (tokens,))
    if not isinstance(model, nn.Module):
        raise NotationError(f"{source} returned {article(model)}: return an nn.Module, or it and its batch")
    if isinstance(given, Mapping):
        return model, (), dict(given)
    return model, (given,) if isinstance(given, torch.Tensor) else as_tuple(given, "the batch", "give it"), {}


def _is_config(source: str) -> bool:
    """Whether the source of a model is a configuration, not a function."""
    return ":" not in source or source.endswith(".json")


@contextmanager
def _told_of_config(arguments: argparse.Namespace) -> Iterator[None]:
    """Within the block, what the code of a configuration's model raises is told in words: it is not the user's code.

    Raises:
        ShapeError: the model does not run on the batch.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DShardError) or not _is_config(arguments.model):
            raise
        raise ShapeError(
            f"{arguments.model}: this model does not run on {arguments.batch} sequences of {arguments.sequence} tokens "
            f"({type(error).__name__}: {shorten(str(error), 200)}): give a --sequence that it takes, and in the "
            f"configuration every key that its type needs; or {WAY_OUT}"
        ) from error


def parse_routing(text: str) -> Routing:
    """How tokens spread over experts, such as uniform, zipf:1.0 or counts.json."""
    try:
        if text.endswith(".json"):
            return Routing.of(json.loads(Path(text).read_text()))
        if text.startswith("zipf:"):
            return Routing.zipf(float(text.removeprefix("zipf:")))
        if text == "uniform":
            return Routing.uniform()
    except (OSError, ValueError, DShardError) as error:
        why = f" ({error})"
    else:
        why = ""
    raise argparse.ArgumentTypeError(f"{text!r} is no routing{why}: write uniform, zipf:1.0 or a .json file of counts")


def parse_share(text: str) -> float:
    """A share above 0, of at most 1."""
    return number_of(text, lambda n: 0 < n <= 1, "no share: write a number above 0, of at most 1")


def _simulate_step(arguments: argparse.Namespace) -> int:
    mesh, strategy = arguments.mesh, arguments.strategy
    if arguments.plan is not None:
        mesh = mesh_of(arguments.plan)
        strategy = plan_of(arguments.plan, mesh)
    topology, why = planned_on(arguments, mesh.size)
    efficiency, _ = _efficiency(arguments, topology)
    with report.waiting("reading the model"):
        model, args, kwargs = model_and_batch(arguments.model, arguments.batch, arguments.sequence)
    reached = with_efficiency(topology, efficiency)
    with report.waiting("simulating"), use_topology(reached), _told_of_config(arguments):
        plan = plan_model(
            model, mesh, strategy, *args, precision=_precision(arguments), routing=arguments.routing, **kwargs
        )
        is_drawn = any(each is not None for each in (arguments.trace, arguments.html, arguments.svg))
        slots = StepPrices(model, args, kwargs).slots(plan) if is_drawn else ()
        if arguments.trace is not None:
            arguments.trace.write_text(chrome_trace(slots))
    cost, moves = plan.cost, [asdict(each) for each in plan.cost.moves]
    value: dict[str, object] = {"strategy": plan.strategy, "mesh": str(plan.mesh), "moves": moves}
    value |= {"seconds": cost.seconds, "received": cost.nbytes}
    value |= {"memory": asdict(cost.memory) | {"total": cost.memory.total}, "efficiency": efficiency}
    return print_result(arguments, value | topology_data(topology, why), report.model_table(plan, slots))


def parse_bytes(text: str) -> float:
    """A size such as 80GB or 80GiB."""
    unit = next((unit for unit in _BYTES if text.endswith(unit)), "")
    factor = _BYTES.get(unit, 1)
    return factor * number_of(text, lambda n: 0 < n * factor < inf, "no size: write it like 80GB or 80GiB", unit)
