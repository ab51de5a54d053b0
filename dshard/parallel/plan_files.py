"""Files of plans: JSON that `ModelPlan.save` and `dshard plan model --out` write, read again where a plan is expected.

A file without layouts names a strategy alone, by which a model is laid out anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from dshard.errors import DShardError, MeshError, StrategyError
from dshard.mesh import Mesh
from dshard.parallel.plan_json import decoded
from dshard.parallel.plan_limits import refined_axes
from dshard.parallel.plan_values import ModelPlan

WAY_OUT = "write one with dshard plan model --out, or plan.save"


def read_plan(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The contents of a file of a plan."""
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StrategyError(f"the plan {path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise StrategyError(f"the plan {path} is no JSON: {error}") from None
    if not isinstance(contents, Mapping):
        raise StrategyError(f"the plan {path} is no JSON object: {WAY_OUT}")
    return contents


def mesh_of(path: Path) -> Mesh:
    """A mesh of the shape and names in the file, of the first ranks."""
    mesh = read_plan(path).get("mesh", {})
    if not isinstance(mesh, Mapping) or not mesh.get("shape") or not mesh.get("names"):
        raise StrategyError(f"the plan {path} names no mesh: {WAY_OUT}")
    return Mesh(tuple(mesh["shape"]), tuple(mesh["names"]))


def plan_of(path: Path, mesh: Mesh) -> ModelPlan | str:
    """The plan in a file, on the ranks of `mesh`; of one that names a strategy alone that, for a mesh of its shape."""
    contents = read_plan(path)
    strategy, shape = contents.get("strategy"), contents.get("mesh", {}).get("shape")
    if not isinstance(strategy, str):
        raise StrategyError(f"the plan {path} names no strategy: {WAY_OUT}")
    has_layouts = "parameters" in contents
    if shape != list(mesh.shape) and not (has_layouts and refined_axes(mesh.shape, mesh_of(path).shape)):
        raise MeshError(f"the plan {path} is for a mesh of {shape}, but the mesh is ({mesh}): make one of that shape")
    if not has_layouts:
        return strategy
    try:
        return plan_from(contents, mesh)
    except (DShardError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise StrategyError(f"the plan {path} is not understood ({error}): {WAY_OUT}") from error


def plan_from(data: Mapping[str, Any], mesh: Mesh) -> ModelPlan:
    """The plan with these `ModelPlan.data()`, on the ranks of `mesh`."""
    own, contents = data["mesh"], {**data, "mesh": None}
    laid = replace(mesh, shape=tuple(own["shape"]), names=tuple(own["names"]))
    if "batch" in contents:  # of a file from when all inputs had one layout
        contents["inputs"] = {"": contents.pop("batch")}
    plan: ModelPlan = decoded(ModelPlan, contents, laid)
    return plan
