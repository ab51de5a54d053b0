"""torch's own tracing of a module into parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx, nn


def split_graph(module: nn.Module, example: Sequence[Tensor], at: Sequence[str]) -> fx.GraphModule:
    """A graph whose calls are the parts of a module, each from one of the submodules `at` to the next."""
    from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: PLC0415

    points = dict.fromkeys(at, SplitPoint.BEGINNING)
    found: fx.GraphModule = pipeline(module, tuple(example), split_spec=points).split_gm
    return found
