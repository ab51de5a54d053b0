"""Read a plan, or the strategy alone, from a file that `dshard plan model` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from dshard.errors import MeshError, StrategyError
from dshard.mesh import Mesh


def read_plan(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The contents of a file that `dshard plan model` wrote."""
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StrategyError(f"the plan {path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise StrategyError(f"the plan {path} is no JSON: {error}") from None
    if not isinstance(contents, Mapping):
        raise StrategyError(f"the plan {path} is no JSON object: write one with dshard plan model --out")
    return contents


def strategy_of(path: Path, mesh: Mesh) -> str:
    """The strategy named in the file, for a mesh of the shape named there."""
    contents = read_plan(path)
    strategy = contents.get("strategy")
    if not isinstance(strategy, str):
        raise StrategyError(f"the plan {path} names no strategy: write one with dshard plan model --out")
    if beyond := contents.get("beyond"):
        raise StrategyError(
            f"the plan {path} asks for {' and '.join(map(str, beyond))}, which parallelize does not do: write one that "
            f"it runs with dshard plan model --runnable; or lay out each part, on the mesh of its stage, by "
            f"parallelize(part, mesh, {strategy!r}, batch), and do the rest with Pipeline, checkpoint or your optimiser"
        )
    shape = contents.get("mesh", {}).get("shape")
    if shape != list(mesh.shape):
        raise MeshError(f"the plan {path} is for a mesh of {shape}, but the mesh is ({mesh}): make one of that shape")
    return strategy
