"""The outputs of a parallelized module: distributed tensors, in given placements or not, or plain tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dshard.callers import asked_by
from dshard.errors import LayoutError
from dshard.layout import layout_of
from dshard.parallel.batch_rows import Rows
from dshard.parallel.nested_tensors import map_tensors
from dshard.parallel.plan_values import Plan
from dshard.placements import Placement
from dshard.tensor import DTensor
from dshard.validate import shown

OutputForm: TypeAlias = str | Sequence[Placement] | None
"""The argument `outputs`: a name, placements, or None: plain for callers of `LIBRARIES`, else distributed."""

LIBRARIES = ("transformers", "trl")
"""Libraries whose code combines the outputs of a model with plain tensors."""
_PASSED = ("dshard", "torch", "accelerate", "peft", "contextlib", "functools")
"""Libraries whose code passes on the outputs of a model."""


def checked_outputs(plan: Plan, outputs: object) -> OutputForm:
    """Check the argument `outputs` of `parallelize`, and return it with placements of dshard."""
    if outputs is None or outputs in ("distributed", "plain"):
        return outputs
    way_out = "give 'distributed', 'plain' or placements, one for each mesh axis"
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise LayoutError(f"outputs={shown(outputs)}: {way_out}")
    return layout_of(plan.mesh, outputs, sys.maxsize).placements


class Outputs:
    """Converts the outputs of a model to tensors of the given `form`."""

    def __init__(self, plan: Plan, form: OutputForm) -> None:
        self.plan, self.form = plan, form

    def __call__(self, out: object, rows: Rows | None) -> Any:
        """Convert the outputs `out` of a call whose inputs were `rows` of each data rank, None for global inputs."""
        if self.form == "distributed" or (self.form is None and type(out) is DTensor):
            return out
        if self.form is None:
            return _for_caller(out, rows)
        if self.form == "plain":
            return map_tensors(out, lambda x: plain(x, rows))
        return map_tensors(out, self._placed)

    def _placed(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(placements=self.form)  # type: ignore[arg-type]


def plain(x: Tensor, rows: Rows | None) -> Tensor:
    """A distributed tensor as a plain one: the global tensor, or this rank's `rows` of a batch."""
    if not isinstance(x, DTensor):
        return x
    if rows is None:
        return x.full_tensor()
    return rows.part(x) if x.dim() and x.shape[0] == rows.total else rows.whole(x)


def _for_caller(out: Any, rows: Rows | None) -> Any:
    """The outputs as the caller needs them: plain if the caller is of `LIBRARIES` and they are a `ModelOutput`.

    Such code indexes and concatenates them with plain tensors, as `generate` does. In a training step with a loss it
    uses only the loss, so the rest is not gathered.
    """
    if is_dynamo_compiling() or not _is_model_output(out) or not asked_by(*LIBRARIES, through=_PASSED):
        return out
    loss = out.get("loss")
    if torch.is_grad_enabled() and isinstance(loss, DTensor) and loss.requires_grad:
        step_output = copy(out)
        step_output["loss"] = plain(loss, rows)
        return step_output
    return map_tensors(out, lambda x: plain(x, rows))


def _is_model_output(out: object) -> bool:
    return any(c.__name__ == "ModelOutput" and c.__module__.startswith("transformers.") for c in type(out).__mro__)
