"""Runs of compiled graphs: they publish their errors, so that ranks waiting for this one raise them too, and give
distributed gradients to results that a loss leaves out.

torch.compile returns functions that run no line of dshard. AOTAutograd wraps each graph, forward and backward, in a
function of its own, and has no hook for it; what makes that function is replaced by one that wraps it once more, where
the graph takes distributed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from dshard.comm import publish_failure, wait_in_graphs_as_in_eager, watch_backward
from dshard.compile.metadata import CompileMetadata
from dshard.core.signature import Context
from dshard.core.wrapper import Wrapper, wrap
from dshard.torch_private import late

_WRAPPER = "torch._functorch._aot_autograd.runtime_wrappers.RuntimeWrapper"
_WRAPPED: list[str] = []
"""The name, once its class wraps graphs, or torch has been found not to have it."""


def wrap_graph_runs() -> None:
    """Wrap graphs compiled from now on, and read other ranks' errors while waiting in them.

    Without torch's private name, graphs read those of others, and are silent about their own.
    """
    wait_in_graphs_as_in_eager()
    if _WRAPPED:
        return
    _WRAPPED.append(_WRAPPER)
    try:
        wrapper = late(_WRAPPER)
    except ImportError:
        return
    original = wrapper.post_compile

    @wraps(original)
    def post_compile(
        self: Any, graph: Callable[..., Any], *args: Any, runtime_metadata: Any, **kwargs: Any
    ) -> Callable[[Any], Any]:
        ranks = _ranks(getattr(each, "meta", None) for each in runtime_metadata.subclass_inp_meta)
        if ranks and self.trace_joint:
            graph = _with_all_gradients(graph)
        run: Callable[[Any], Any] = original(self, graph, *args, runtime_metadata=runtime_metadata, **kwargs)
        return _publishing(run, ranks) if ranks else run

    wrapper.post_compile = post_compile


def _ranks(metas: Iterable[object]) -> tuple[int, ...]:
    """Return the ranks of the mesh of a graph's first distributed input."""
    return next((meta.origin.layout.mesh.ranks for meta in metas if isinstance(meta, CompileMetadata)), ())


def _publishing(run: Callable[[Any], Any], ranks: tuple[int, ...]) -> Callable[[Any], Any]:
    @wraps(run)
    def compiled_graph(args: object) -> Any:  # errors of ranks that wait have its name
        wait_in_graphs_as_in_eager()
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


def _with_all_gradients(graph: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(graph)
    def run(*args: object) -> Any:
        outs = list(graph(*args))
        if len(outs) == 1:
            return outs
        tracked = [i for i, out in enumerate(outs) if isinstance(out, Tensor) and out.requires_grad]
        if len(tracked) > 1 and any(isinstance(outs[i], Wrapper) for i in tracked):
            results = Results.apply(*(outs[i] for i in tracked))  # type: ignore[no-untyped-call]
            for i, out in zip(tracked, results, strict=True):
                outs[i] = out
        return outs

    return run


class Results(torch.autograd.Function):
    """Results of a graph, unchanged; backward: zeros distributed alike for those that a loss does not depend on.

    Torch would give plain zeros to a backward graph, which was compiled for a distributed gradient.
    """

    @staticmethod
    def forward(ctx: Context, *outs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.zeros = [_zeros_like(out) if isinstance(out, Wrapper) else None for out in outs]
        return tuple(wrap(out._local_tensor, out._spec) if isinstance(out, Wrapper) else out.detach() for out in outs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(
            zeros() if grad is None and zeros is not None else grad
            for grad, zeros in zip(grads, ctx.zeros, strict=True)
        )


def _zeros_like(out: Wrapper) -> Callable[[], Wrapper]:
    """A function that makes the gradient of a result that no loss depends on; it keeps no memory of the result."""
    local: Tensor = out._local_tensor
    empty = partial(torch.empty_strided, tuple(local.shape), local.stride(), dtype=local.dtype, device=local.device)
    spec = out._spec.with_layout(out._spec.layout.cotangent())
    return lambda: wrap(empty().zero_(), spec)
