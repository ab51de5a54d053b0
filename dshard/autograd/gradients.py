"""Functions of autograd that distributed tensors answer themselves: gradients, hooks within a node, and `data`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.autograd.gathered_weights import stored_part
from dshard.core.plain_tensors import alike_tensor
from dshard.core.replaced_parameters import successor
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import call_torch
from dshard.core.transforms import refuse_batched
from dshard.core.view_sync import root_of, shown_of
from dshard.core.wrapper import Wrapper
from dshard.errors import MixedError, ShapeError
from dshard.torch_private import DispatchKey, DispatchKeySet, no_torch_function

UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. "
    "Set allow_unused=True if this is the desired behavior."
)


class InnerGraph(Protocol):
    """A node of autograd that stands for many operators: of tensors in its middle it passes only part of the gradient.

    Whoever asks for the gradient of `tap` has the node run.
    """

    tap: Tensor

    def uses(self, i: int) -> bool:
        """Whether the node stands for an operator that used its output number `i`."""
        ...

    def add_hook(self, i: int, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call `hook` with the whole gradient of output number `i`."""
        ...


def _inner_graph(x: object) -> InnerGraph | None:
    """The node that stands for operators which used `x`, a tensor or an edge to it, beside the one that made it."""
    if not isinstance(x, Wrapper | GradientEdge):
        return None
    with no_torch_function():
        node = x.grad_fn if isinstance(x, Wrapper) else x.node
        graph: InnerGraph | None = getattr(node, "inner", None)
        return graph if graph is not None and graph.uses(x.output_nr) else None


def _hook_within(x: Wrapper | GradientEdge, graph: InnerGraph, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    with no_torch_function():
        return graph.add_hook(x.output_nr, hook)


def register_hook(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.register_hook`: within a node that stands for many operators, of the whole gradient.

    Such a node has edges to leaves that the operators of a run did not use: torch calls their hooks with None.
    """
    x, hook = (*args, *kwargs.values())
    inner = _inner_graph(x)
    if inner is not None:
        return _hook_within(x, inner, hook)
    if x._gradient_leaf is not None:
        return call_torch(func, (x, lambda grad: None if grad is None else hook(grad)), {})
    return call_torch(func, args, kwargs)


def register_post_accumulate_grad_hook(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.register_post_accumulate_grad_hook`: called in passes that have a gradient of the leaf."""
    x, hook = (*args, *kwargs.values())
    if x._gradient_leaf is None:
        return call_torch(func, args, kwargs)

    def if_there(x: Any) -> Any:
        return hook(x) if x._gradient_leaf.has_gradient else None  # another one since `x` was converted

    return call_torch(func, (x, if_there), {})


def retain_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.retain_grad`."""
    inner = _inner_graph(args[0])
    if inner is None:
        return call_torch(func, args, kwargs)
    held = ref(args[0])  # the graph would hold itself

    def keep(grad: Tensor) -> None:
        x = held()
        if x is not None:
            x.grad = grad if x.grad is None else x.grad + grad

    _hook_within(args[0], inner, keep)
    return None


def set_data(func: Function, args: Args, kwargs: Kwargs) -> None:
    """`x.data = value`: give `x` the layout and the local tensor of `value`, unseen by autograd.

    A plain value, where it is alike on all ranks, is laid out as `x` is.
    """
    x, value = args
    if isinstance(value, Wrapper):
        value._is_assigned = False
    if value is x:
        return
    if not isinstance(value, Wrapper):
        value, layout = alike_tensor(func, value.detach(), x._spec.layout.mesh), x._spec.layout
        value = None if value is None else redistribute(value, layout)
    if value is None:
        raise MixedError(
            f"x.data = a plain torch.Tensor of shape {tuple(args[1].shape)}, of a distributed x: wrap it with "
            "distribute_tensor(value, x.device_mesh, x.placements), or DTensor.from_local if each rank has a part"
        )
    with no_torch_function():
        func(x, value)
    stored = stored_part(x)
    x._local_tensor, x._spec, x._view_sync = value._local_tensor.detach(), value._spec, None
    if x._gradient_leaf is not None:
        x._gradient_leaf.layout = x._spec.layout.cotangent()
    if stored is not None:
        stored.assign(x)


def _has_compatible_type(x: Tensor, value: Tensor) -> bool:
    """The question of `x.data = value` whether the types fit; torch asks no class but that of `x`."""
    if isinstance(value, Wrapper) and not isinstance(x, Wrapper):
        raise MixedError(
            f"x.data = a distributed tensor, laid out [{value._spec.layout}], of a plain x, which then had no memory: "
            "give value.full_tensor(), or replace it, as in module.weight = nn.Parameter(value)"
        )
    return torch.ops.aten._has_compatible_shallow_copy_type.default.redispatch(_BELOW_CLASSES, x, value)  # type: ignore[no-any-return]


_BELOW_CLASSES = DispatchKeySet(DispatchKey.CPU)
_LIBRARY = torch.library.Library("aten", "IMPL")
for _key in ("AutogradCPU", "AutogradCUDA"):  # torch's own kernel precedes one for all
    _LIBRARY.impl("_has_compatible_shallow_copy_type", _has_compatible_type, _key)


def data(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.data`: a tensor that shares the memory, with a version counter of its own."""
    out, x = call_torch(func, args, kwargs), args[0]
    if type(out._local_tensor) is Tensor:
        local = out._local_tensor
        out._local_tensor = local.data
        out._local_tensor._view_syncs = shown_of(root_of(x)._local_tensor)
    return out


def gradients(run: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.grad`; `run` is torch's function. A parameter that was replaced counts as what replaced it."""
    options = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    for grad in _as_list(options.get("grad_outputs")):
        refuse_batched(grad, "torch.autograd.grad")
    inputs = options.get("inputs")
    if isinstance(inputs, dict | None):
        return run(*args, **kwargs)
    if options.get("is_grads_batched"):
        return _stacked_gradients(run, options)
    options["inputs"] = inputs = [
        successor(x) for x in ([inputs] if isinstance(inputs, Tensor | GradientEdge) else inputs)
    ]
    inner = [_inner_graph(x) for x in inputs]
    if any(inner):
        return _gradients_within(run, options, inputs, inner)
    return tuple(map(_distributed_as, inputs, run(**options)))


def _gradients_within(
    run: Function, options: dict[str, Any], inputs: Sequence[Any], inner: Sequence[InnerGraph | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of inputs of which some lie within a node that stands for many operators."""
    unused = options.get("allow_unused") or options.get("materialize_grads")
    arrived: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for i, (x, graph) in enumerate(zip(inputs, inner, strict=True)):
            if graph is not None:
                stack.callback(_hook_within(x, graph, partial(arrived.__setitem__, i)).remove)
        asked = [x if graph is None else graph.tap for x, graph in zip(inputs, inner, strict=True)]
        grads = gradients(run, (), {**options, "inputs": asked, "allow_unused": True, "materialize_grads": False})
    out = [arrived.get(i) if inner[i] is not None else grad for i, grad in enumerate(grads)]
    if not unused and any(grad is None for grad in out):
        raise RuntimeError(UNUSED)
    if options.get("materialize_grads"):
        out = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, out, strict=True)]
    return tuple(out)


def _distributed_as(x: Tensor, grad: Tensor | None) -> Tensor | None:
    """A gradient of `x` as torch has it; that of a vector without elements in a `cat` is plain zeros there."""
    return as_distributed(grad, x._spec.layout) if isinstance(x, Wrapper) and type(grad) is Tensor else grad


def _as_list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _stacked_gradients(run: Function, options: dict[str, object]) -> Any:
    """The stacked gradients for several gradients of the outputs (`is_grads_batched`): one backward pass for each."""
    grads, last = _as_list(options["grad_outputs"]), {"retain_graph": options.get("retain_graph")}
    n = next(len(grad) for grad in grads if grad is not None)
    if not n:
        raise ShapeError("torch.autograd.grad(..., is_grads_batched=True) with no gradient of the outputs: give one")
    passes = []
    for i in range(n):
        grad_outputs = [None if grad is None else grad[i] for grad in grads]
        retain = {"retain_graph": True} if i < n - 1 else last
        passes.append(
            gradients(run, (), {**options, **retain, "grad_outputs": grad_outputs, "is_grads_batched": False})
        )
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*passes, strict=True))


_ARGUMENTS = (
    "outputs",
    "inputs",
    "grad_outputs",
    "retain_graph",
    "create_graph",
    "only_inputs",
    "allow_unused",
    "is_grads_batched",
    "materialize_grads",
)


def accumulating(run: Function, args: Args, kwargs: Kwargs) -> Any:
    """`backward`; `run` is torch's function."""
    inputs = kwargs.get("inputs")
    if inputs is None:
        return run(*args, **kwargs)
    inputs = inputs.values() if isinstance(inputs, dict) else [inputs] if isinstance(inputs, Tensor) else inputs
    inputs = [successor(x) for x in inputs]
    if any(_inner_graph(x) is not None for x in inputs):
        raise RuntimeError(
            "backward(inputs=...) with an activation in the middle of a rehearsed module: ask for its gradient by "
            "torch.autograd.grad, or run the module `with dshard.rehearsing(False):`"
        )
    return run(*args, **{**kwargs, "inputs": inputs})
