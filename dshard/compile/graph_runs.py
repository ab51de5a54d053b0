"""Runs of compiled graphs, which publish their errors so that ranks waiting for this one raise them too.

torch.compile returns functions that run no line of dshard. AOTAutograd wraps each graph, forward and backward, in a
function of its own, and has no hook for it; what makes that function is replaced by one that wraps it once more, where
the graph takes distributed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import Tensor

from dshard.comm import publish_failure, wait_in_graphs_as_in_eager, watch_backward
from dshard.compile.metadata import CompileMetadata
from dshard.torch_private import late

_WRAPPER = "torch._functorch._aot_autograd.runtime_wrappers.RuntimeWrapper"


def tell_of_failures() -> None:
    """Publish errors of graphs compiled from now on, and read other ranks' errors while waiting in them.

    Without torch's private name, graphs read those of others, and are silent about their own.
    """
    if not wait_in_graphs_as_in_eager():
        return
    try:
        wrapper = late(_WRAPPER)
    except ImportError:
        return
    original = wrapper.post_compile

    @wraps(original)
    def post_compile(self: Any, *args: Any, runtime_metadata: Any, **kwargs: Any) -> Callable[[Any], Any]:
        run: Callable[[Any], Any] = original(self, *args, runtime_metadata=runtime_metadata, **kwargs)
        ranks = _ranks(getattr(each, "meta", None) for each in runtime_metadata.subclass_inp_meta)
        return _publishing(run, ranks) if ranks else run

    wrapper.post_compile = post_compile


def _ranks(metas: Iterable[object]) -> tuple[int, ...]:
    """Return the ranks of the mesh of a graph's first distributed input."""
    return next((meta.origin.layout.mesh.ranks for meta in metas if isinstance(meta, CompileMetadata)), ())


def _publishing(run: Callable[[Any], Any], ranks: tuple[int, ...]) -> Callable[[Any], Any]:
    @wraps(run)
    def compiled_graph(args: object) -> Any:  # errors of ranks that wait have its name
        try:
            outs = run(args)
        except Exception as error:
            publish_failure(error, ranks)
            raise
        for out in outs:
            if type(out) is Tensor and out.grad_fn is not None:  # distributed ones publish errors themselves
                watch_backward(out, ranks)
        return outs

    return compiled_graph
