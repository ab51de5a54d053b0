"""Setups and simulated steps as plain data, for files and for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from typing import Any

from dshard.errors import StrategyError
from dshard.parallel.plan_files import read_plan
from dshard.simulate.setup import Setup
from dshard.simulate.tensor_forms import form_of
from dshard.simulate.training_step import Step


def setup_data(setup: Setup) -> dict[str, Any]:
    """A setup as JSON values: `read_setup` takes them back, `parallelize` strategy and mesh if nothing is `beyond`."""
    return {
        "strategy": setup.strategy,
        "mesh": {"shape": list(setup.mesh.shape[1:]), "names": list(setup.mesh.names[1:])},
        "form": setup.form.name,
        "tensor": list(setup.tensor),
        "data": setup.data,
        "stages": setup.stages,
        "microbatches": setup.microbatches,
        "sharded": setup.sharded,
        "recompute": setup.recompute,
        "beyond": list(setup.beyond),
    }


def step_data(step: Step) -> dict[str, Any]:
    """A simulated step as JSON values."""
    return {
        "setup": setup_data(step.setup),
        "batch": step.batch,
        "seconds": step.seconds,
        "sequences_per_second": step.sequences_per_second,
        "bubble": step.bubble,
        "memory": asdict(step.memory) | {"total": step.memory.total},
        "totals": asdict(step.totals),
    }


def read_setup(path: str | PathLike[str]) -> Setup:
    """The setup that a file describes."""
    return setup_from(read_plan(path))


def setup_from(values: Mapping[str, Any]) -> Setup:
    """The setup of JSON values."""
    if not isinstance(values.get("form"), str):
        raise StrategyError("form: give the name of a form of tensor parallelism")
    form, tensor = form_of(values["form"]), values.get("tensor", [])
    fields = ("data", "stages", "microbatches", "sharded", "recompute")
    setup = Setup(form, tensor, **{name: values[name] for name in fields if name in values})
    if len(setup.tensor) != len(form.roles):
        raise StrategyError(f"tensor: {form.name!r} has {len(form.roles)} mesh axes, but {len(tensor)} sizes are given")
    return setup
