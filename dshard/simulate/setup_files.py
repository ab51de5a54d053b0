"""Setups and simulated steps as plain data, for files and for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from dshard.errors import StrategyError
from dshard.simulate.setup import Setup
from dshard.simulate.tensor_forms import form_of
from dshard.simulate.training_step import Step

_SHARED = ("none", "optimizer", "all")


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
    """The setup that a file describes.

    Raises:
        StrategyError: no such file, no JSON object, a field that is missing or of another kind; the message names it.
    """
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise StrategyError(f"the plan {path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise StrategyError(f"the plan {path} is no JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise StrategyError(f"the plan {path} is no JSON object: write one with dshard plan model --out")
    return setup_from(found)


def setup_from(found: Mapping[str, Any]) -> Setup:
    """The setup of JSON values.

    Raises:
        StrategyError: a field that is missing or of another kind.
    """
    if not isinstance(found.get("form"), str):
        raise StrategyError("form: give the name of a form of tensor parallelism")
    tensor = found.get("tensor", [])
    if not isinstance(tensor, list) or not all(_counts(size) for size in tensor):
        raise StrategyError(f"tensor: {tensor!r} is no list of sizes above zero")
    counts = {name: found.get(name, 1) for name in ("data", "stages", "microbatches")}
    for name, value in counts.items():
        if not _counts(value):
            raise StrategyError(f"{name}: {value!r} is no whole number above zero")
    sharded, recompute = found.get("sharded", "none"), found.get("recompute", False)
    if sharded not in _SHARED:
        raise StrategyError(f"sharded: {sharded!r} is none of {', '.join(_SHARED)}")
    if not isinstance(recompute, bool):
        raise StrategyError(f"recompute: {recompute!r} is neither true nor false")
    form = form_of(found["form"])
    if len(tensor) != len(form.roles):
        raise StrategyError(f"tensor: {form.name!r} has {len(form.roles)} mesh axes, but {len(tensor)} sizes are given")
    return Setup(form, tuple(tensor), **counts, sharded=sharded, recompute=recompute)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
