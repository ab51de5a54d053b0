"""Calls and guards in the graph of torch.compile; imported only while torch traces, as the import is slow."""

from __future__ import annotations

from typing import Any

from torch.compiler import allow_in_graph

from dshard.compile import FUNCTIONS
from dshard.core import context
from dshard.ops.matmul import options


@allow_in_graph  # type: ignore[untyped-decorator]
def call(name: str, *args: object, **kwargs: object) -> Any:
    """Call the function registered in `FUNCTIONS` under `name`."""
    return FUNCTIONS[name](*args, **kwargs)


def guard() -> None:
    """Make the traced graph depend on the planning context and matmul options in force now, by identity.

    These are the ones that some thread entered last; the metadata of a graph's operands has those of its own thread.
    """
    id(context.GuardedContext.settings)
    id(options.GuardedOptions.options)
