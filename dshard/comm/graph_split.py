"""Splitting a module into a graph of submodules, with torch's own tracing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx, nn


def split_graph(module: nn.Module, example: Sequence[Tensor], at: Sequence[str]) -> fx.GraphModule:
    """A graph that calls a module's stages in order; a stage begins at each of the submodules named in `at`."""
    from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: PLC0415  # slow: few split a model

    points = dict.fromkeys(at, SplitPoint.BEGINNING)
    graph: fx.GraphModule = pipeline(module, tuple(example), split_spec=points).split_gm
    return graph
