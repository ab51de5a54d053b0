"""What torch.compile writes into its graph. Imported while it traces, and only then, for torch._dynamo takes long."""

from __future__ import annotations

from typing import Any

from torch._dynamo import allow_in_graph

from dshard.compile.graph_functions import FUNCTIONS
from dshard.core import context
from dshard.ops.matmul import options


@allow_in_graph  # type: ignore[untyped-decorator]
def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of dshard's, by name."""
    return FUNCTIONS[name](*args, **kwargs)


def guard() -> None:
    """Traced: the graph serves only under the settings in force now, which are told apart by identity.

    They are those that some thread entered last; the tensors that a graph is given say what holds in its own thread.
    """
    id(context.Guarded.settings)
    id(options.Guarded.asked)
