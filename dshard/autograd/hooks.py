"""What is asked of a tensor in the middle of autograd's graph: its node, its gradient, hooks.

A tensor of which operators were recorded on the local part (`dshard.autograd.Live`) is asked there: the gradient does
not come by the distributed tensor. Where nothing was recorded on it yet, it is asked itself, and what is recorded from
then on goes by way of it. A view may be used both ways, and its gradient is then the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.autograd.crossing import FromLocal, LocalGraph, ToLocal, as_distributed, local_graph_of, redistribute
from dshard.core.torch_function import call_torch
from dshard.core.transforms import refuse_batched
from dshard.core.view_sync import shown_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import MixedError, ShapeError
from dshard.layout import interned

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _local_graph_in_use(x: Any) -> LocalGraph | None:
    """What was recorded of `x` on local tensors and taken up since; from now on nothing is, where none was."""
    found = local_graph_of(x) if isinstance(x, Wrapper) else None
    if found is None or found.used:
        return found
    x._local_graph = None
    return None


def _may_have_both(x: Any) -> bool:
    """Whether a gradient may also come by the distributed tensor without coming by the local one."""
    return bool(x._is_view())


def _distributed(x: Any, grad: Tensor) -> Any:
    """A local gradient of `x`, distributed."""
    spec = x._spec.with_layout(x._spec.layout.cotangent())
    return FromLocal.apply(grad, spec, x._spec.layout) if torch.is_grad_enabled() else wrap(grad, spec)  # type: ignore[no-untyped-call]


def register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.register_hook`: the hook is shown a distributed gradient."""
    x, hook = (*args, *kwargs.values())
    found = _local_graph_in_use(x)
    if found is None:
        return call_torch(func, args, kwargs)
    of = x._spec
    spec = of.with_layout(of.layout.cotangent())

    def shown(grad: Tensor) -> Tensor | None:
        recorded = torch.is_grad_enabled()
        given = FromLocal.apply(grad, spec, of.layout) if recorded else wrap(grad, spec)  # type: ignore[no-untyped-call]
        out = hook(given)
        if out is None:
            return None
        out = redistribute(as_distributed(out, spec.layout), spec.layout)
        return ToLocal.apply(out, of) if recorded else out._local  # type: ignore[no-any-return, no-untyped-call]

    if _may_have_both(x):
        call_torch(func, args, kwargs)
    return found.at_home().register_hook(shown)


def retain_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.retain_grad`."""
    found = _local_graph_in_use(args[0])
    if found is None:
        return call_torch(func, args, kwargs)
    if _may_have_both(args[0]):
        call_torch(func, args, kwargs)
    return found.at_home().retain_grad()


def _keeps_gradient(x: Any) -> LocalGraph | None:
    """What is remembered of `x`, with a local tensor that keeps its gradient."""
    found = local_graph_of(x)
    return found if found is not None and found.home is not None and _keeps(found.home) else None


def _keeps(home: Tensor) -> bool:
    return home.retains_grad or getattr(home, "_asked", False)


def retains_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.retains_grad`."""
    return _keeps_gradient(args[0]) is not None or call_torch(func, args, kwargs)


def get_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.grad`."""
    x = args[0]
    found = _keeps_gradient(x)
    if found is None:
        return call_torch(func, args, kwargs)
    assert found.home is not None
    local, own = found.home.grad, call_torch(func, args, kwargs) if _may_have_both(x) else None
    if local is None:
        return own
    grad = _distributed(x, local)
    return grad if own is None else own + grad


def set_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.grad = ...`, `del x.grad`."""
    found = _keeps_gradient(args[0])
    if found is not None and found.home is not None:
        found.home.grad = None
    return call_torch(func, args, kwargs)


def set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.data = value`: from now on `x` has the layout and the local tensor of `value`, as autograd does not see.

    Raises:
        MixedError: `value` is a plain tensor.
    """
    x, value = args
    if not isinstance(value, Wrapper):
        raise MixedError(
            f"x.data = a plain torch.Tensor of shape {tuple(value.shape)}, of a distributed x: wrap it with "
            "distribute_tensor(value, x.device_mesh, x.placements), or DTensor.from_local if each rank has a part"
        )
    with torch._C.DisableTorchFunctionSubclass():
        func(x, value)
    x._local, x._spec, x._local_graph, x._view_sync = value._local.detach(), value._spec, None, None
    if x._gradient_layout is not None:
        x._gradient_layout[:] = [interned(x._spec.layout.cotangent())]


def grad_fn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.grad_fn`: the node by which every gradient comes."""
    found = local_graph_of(args[0])
    if found is None or _may_have_both(args[0]):
        return call_torch(func, args, kwargs)
    return found.at_home().grad_fn


def detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.detach_`: what was recorded of it counts no more."""
    out = call_torch(func, args, kwargs)
    args[0]._local_graph = None
    return out


def data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.data`: the same memory, whose writes are not counted."""
    out = call_torch(func, args, kwargs)
    if type(out._local) is Tensor:
        local = out._local
        out._local = local.data
        out._local._view_syncs = shown_of(local)
    return out


def gradient_sources(inputs: Sequence[Any]) -> list[list[Any]]:
    """For each tensor by whose gradient is asked, those by which it comes."""
    found = []
    for x in inputs:
        used = _local_graph_in_use(x)
        home = [] if used is None else [used.at_home()]
        found.append([x, *home] if not home or _may_have_both(x) else home)
    return found


def gradients(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad`, by `run`."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    for grad in _listed(given.get("grad_outputs")):
        refuse_batched(grad, "torch.autograd.grad")
    if given.get("is_grads_batched") and not isinstance(given.get("inputs"), dict):
        return _one_by_one(run, given)
    if len(args) > 4 or isinstance(given.get("inputs"), dict | None):
        return run(*args, **kwargs)
    inputs = given["inputs"]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    sources = gradient_sources(inputs)
    if all(len(source) == 1 and source[0] is x for source, x in zip(sources, inputs, strict=True)):
        return run(*args, **kwargs)
    given["inputs"] = [t for source in sources for t in source]
    unused = given.get("allow_unused")
    if any(len(source) > 1 for source in sources):
        given["allow_unused"] = True
    found, out = iter(run(**given)), []
    for x, source in zip(inputs, sources, strict=True):
        parts = [grad if t is x or grad is None else _distributed(x, grad) for t in source for grad in [next(found)]]
        present = [grad for grad in parts if grad is not None]
        if not present and not (unused or given.get("materialize_grads")):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        out.append(present[0] + present[1] if len(present) > 1 else present[0] if present else None)
    return tuple(out)


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given]


def _one_by_one(run: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The gradients for each of several gradients of the outputs, stacked: backward passes take one at a time.

    Raises:
        ShapeError: there are none.
    """
    grads, last = _listed(given["grad_outputs"]), {"retain_graph": given.get("retain_graph")}
    n = next(len(grad) for grad in grads if grad is not None)
    if not n:
        raise ShapeError("torch.autograd.grad(..., is_grads_batched=True) with no gradient of the outputs: give one")
    found = []
    for i in range(n):
        now = [None if grad is None else grad[i] for grad in grads]
        kept = {"retain_graph": True} if i < n - 1 else last
        found.append(gradients(run, (), {**given, **kept, "grad_outputs": now, "is_grads_batched": False}))
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*found, strict=True))


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


def accumulating(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`backward`, by `run`, which may be asked for the gradients of some tensors alone."""
    inputs = kwargs.get("inputs")
    if inputs is None:
        return run(*args, **kwargs)
    inputs = inputs.values() if isinstance(inputs, dict) else inputs
    sources = gradient_sources([inputs] if isinstance(inputs, Tensor) else list(inputs))
    for source in sources:
        if not isinstance(source[-1], Wrapper):
            source[-1]._asked = True
    return run(*args, **{**kwargs, "inputs": [t for source in sources for t in source]})


def _without_torch_function(door: Handler) -> Handler:
    """The door closed behind who came in by it, and open to nobody of whom nothing is remembered."""

    def closed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cls = Wrapper.public
        with torch._C.DisableTorchFunctionSubclass():
            x = args[0]
            return func(*args, **kwargs) if type(x) is cls and x._local_graph is None else door(func, args, kwargs)

    return closed


_GRAD: Any = Tensor.grad
_NODE: Any = Tensor.grad_fn
_RETAINS: Any = Tensor.retains_grad
_HANDLERS: dict[Any, Handler] = {
    Tensor.register_hook: register_hook,
    Tensor.retain_grad: retain_grad,
    _RETAINS.__get__: retains_grad,
    _GRAD.__get__: get_grad,
    _GRAD.__set__: set_grad,
    _GRAD.__delete__: set_grad,
    _NODE.__get__: grad_fn,
    Tensor.detach_: detach_,
    torch.detach_: detach_,
}
GRAPH_FUNCTIONS = {func: _without_torch_function(door) for func, door in _HANDLERS.items()}
"""What is caught of that; `gradients` and `accumulating` are beside."""
