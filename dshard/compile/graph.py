"""Calls and guards that torch.compile writes into its graph. Imported only while torch traces, for it is slow."""

from __future__ import annotations

from typing import Any

from torch.compiler import allow_in_graph

from dshard.compile.graph_functions import FUNCTIONS
from dshard.core import context
from dshard.ops.matmul import options


@allow_in_graph  # type: ignore[untyped-decorator]
def call(name: str, *args: object, **kwargs: object) -> Any:
    """Call the function of dshard that is registered under `name`."""
    return FUNCTIONS[name](*args, **kwargs)


def guard() -> None:
    """Traced: guard the graph by the identity of the planning context and the matmul options in force now.

    These are the ones that some thread entered last; the metadata of a graph's operands has those of its own thread.
    """
    id(context.Guarded.settings)
    id(options.Guarded.options)
