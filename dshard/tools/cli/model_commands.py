"""`dshard plan model` and `dshard simulate step`: choose a model's layout, and predict its training step."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from dshard.explain import parse_dtype
from dshard.simulate import FORMS, Model, Setup, form_of, search, simulate_step, timeline
from dshard.simulate.training_step import read_setup, setup_data, step_data
from dshard.step_timeline import chrome_trace
from dshard.tools import report
from dshard.tools.cli.arguments import (
    Commands,
    add_command,
    add_common,
    add_files,
    parse_devices,
    parse_output,
    parse_positive,
    planned_on,
    print_result,
    topology_data,
)
from dshard.tools.report.setup_tables import SHOWN, below_model, setups_table, step_table

_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def add_plan_model(kinds: Commands) -> None:
    """Add `model` to what can be planned."""
    summary = "every way to spread a transformer over devices, the fastest that fit in memory first"
    parser = add_command(kinds, "model", summary)
    parser.add_argument("--devices", type=parse_devices, required=True, metavar="N", help="how many")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help="of each device (the preset's)")
    form = f"a form of tensor parallelism to try, repeatable (all): {', '.join(FORMS)}"
    parser.add_argument("--form", action="append", choices=FORMS, metavar="NAME", help=form)
    parser.add_argument("--top", type=parse_positive, default=SHOWN, metavar="N", help=f"how many to show ({SHOWN})")
    parser.add_argument("--runnable", action="store_true", help="only what parallelize runs by itself")
    parser.add_argument(
        "--out", type=parse_output, metavar="FILE", help="write the fastest as a plan, for simulate step"
    )
    _add_model(parser)
    add_common(parser, _plan_model)
    add_files(parser)


def add_simulate_step(kinds: Commands) -> None:
    """Add `step` to what can be simulated."""
    summary = "a training step of a transformer: seconds, bytes and memory, before it is launched"
    parser = add_command(kinds, "step", summary)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="one that plan model wrote, in place of the next six")
    form = f"of tensor parallelism: {', '.join(FORMS)}; default: %(default)s"
    parser.add_argument("--form", choices=FORMS, default="megatron", metavar="NAME", help=form)
    parser.add_argument("--tensor", type=_sizes, default=(), metavar="SIZES", help="of its mesh axes, such as 2x4")
    for name, what in ("data", "replicas"), ("stages", "pipeline stages"), ("microbatches", "microbatches"):
        parser.add_argument(f"--{name}", type=parse_positive, default=1, metavar="N", help=f"{what} (1)")
    shares = ("none", "optimizer", "all")
    parser.add_argument("--sharded", choices=shares, default="none", help="what replicas share out (none)")
    parser.add_argument("--recompute", action="store_true", help="run each block again for its backward pass")
    parser.add_argument("--no-overlap", action="store_true", help="collectives and work wait for each other")
    parser.add_argument("--trace", type=parse_output, metavar="FILE", help="write the timeline as a Chrome trace")
    _add_model(parser)
    add_common(parser, _simulate_step)
    add_files(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="FILE", help="its sizes, or a Hugging Face config.json")
    parser.add_argument("--batch", type=parse_positive, required=True, metavar="N", help="sequences of a step")
    parser.add_argument("--sequence", type=parse_positive, metavar="N", help="tokens of one, if not the model's")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME", help="of the products; default: %(default)s")


def _plan_model(arguments: argparse.Namespace) -> int:
    model = _model(arguments)
    topology, why = planned_on(arguments, arguments.devices)
    with report.search_progress(visible=True) as progress:
        setups = search(
            model,
            arguments.devices,
            topology,
            arguments.batch,
            memory=arguments.memory,
            forms=arguments.form,
            dtype=_dtype(arguments),
            itemsize=arguments.itemsize,
            runnable=arguments.runnable,
            progress=progress,
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(setup_data(setups.steps[0].setup), indent=2) + "\n")
    rows = [step_data(step) for step in setups.steps[: arguments.top]]
    front = [step_data(step) for step in setups.front]
    value = {"tried": setups.tried, "fitting": setups.fitting, "memory": setups.memory, "setups": rows, "front": front}
    table = below_model(model, setups_table(setups, why, arguments.top))
    return print_result(arguments, value | _model_data(model) | topology_data(topology, why), table)


def _simulate_step(arguments: argparse.Namespace) -> int:
    model, setup = _model(arguments), _setup(arguments)
    topology, why = planned_on(arguments, setup.devices)
    overlap = not arguments.no_overlap
    kinds = {"dtype": _dtype(arguments), "itemsize": arguments.itemsize, "overlap": overlap}
    with report.waiting("simulating"):
        step = simulate_step(model, setup, topology, arguments.batch, **kinds)
        slots = timeline(model, setup, topology, arguments.batch, **kinds)
    if arguments.trace is not None:
        arguments.trace.write_text(chrome_trace(slots))
    table = below_model(model, step_table(step, slots, topology, why))
    return print_result(arguments, step_data(step) | _model_data(model) | topology_data(topology, why), table)


def _model(arguments: argparse.Namespace) -> Model:
    changes = {} if arguments.sequence is None else {"sequence": arguments.sequence}
    with report.waiting("reading the model"):
        return Model.load(arguments.model, **changes)


def _model_data(model: Model) -> dict[str, object]:
    return {"model": asdict(model) | {"parameters": model.parameters}}


def _dtype(arguments: argparse.Namespace) -> str:
    """Return the full name of the requested dtype, as topologies spell it."""
    return str(parse_dtype(arguments.dtype)).removeprefix("torch.")


def _setup(arguments: argparse.Namespace) -> Setup:
    if arguments.plan is not None:
        return read_setup(arguments.plan)
    return Setup(
        form_of(arguments.form),
        arguments.tensor,
        arguments.data,
        arguments.stages,
        arguments.microbatches,
        arguments.sharded,
        arguments.recompute,
    )


def parse_bytes(text: str) -> float:
    """A size such as 80GB or 80GiB."""
    unit = next((unit for unit in _BYTES if text.endswith(unit)), "")
    try:
        size = float(text.removesuffix(unit)) * _BYTES.get(unit, 1)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it like 80GB or 80GiB")
    return size


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_positive(part) for part in text.split("x"))
