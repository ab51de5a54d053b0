"""Gradients, nodes and hooks of tensors in the middle of autograd's graph.

A tensor that operators on local tensors made (`LocalGraph` in `crossing.py`) has its gradient there: it does not pass
through the distributed tensor. A view may be used both ways, and its gradient is the sum of both; where nothing was
recorded on its local tensor yet, torch asks the distributed one, and operators from then on are recorded through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dshard.autograd.crossing import FromLocal, LocalGraph, ToLocal, as_distributed, local_graph_of, redistribute
from dshard.autograd.gathered_weights import stored_part
from dshard.core.replaced_parameters import successor
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import call_torch
from dshard.core.transforms import refuse_batched
from dshard.core.view_sync import root_of, shown_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import MixedError, ShapeError
from dshard.layout import interned
from dshard.torch_private import no_torch_function

Handler = Callable[[Any, Args, Kwargs], Any]
UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. "
    "Set allow_unused=True if this is the desired behavior."
)


def _local_graph_in_use(x: Any) -> LocalGraph | None:
    """The local graph of `x`; a view without recorded uses of its local tensor drops its graph and has None.

    The operator that made `x` may have saved its local result: in a backward pass of higher order part of the gradient
    then comes from the local result, not through the distributed tensor.
    """
    graph = local_graph_of(x) if isinstance(x, Wrapper) else None
    if graph is None or graph.used or not _may_have_two_sources(x):
        return graph
    x._local_graph = None
    return None


def _may_have_two_sources(x: Wrapper) -> bool:
    """Whether part of the gradient may pass through the distributed tensor without passing through the local one."""
    return bool(x._is_view())


def _wrap_gradient(x: Wrapper, grad: Tensor) -> Wrapper:
    """Wrap a local gradient of `x`."""
    spec = x._spec.with_layout(x._spec.layout.cotangent())
    return FromLocal.apply(grad, spec, x._spec.layout) if torch.is_grad_enabled() else wrap(grad, spec)  # type: ignore[no-untyped-call]


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
    """The node that stands for operators which used `x`, beside the one that made it."""
    if not isinstance(x, Wrapper):
        return None
    with no_torch_function():
        graph: InnerGraph | None = getattr(x.grad_fn, "inner", None)
        return graph if graph is not None and graph.uses(x.output_nr) else None


def _hook_within(x: Wrapper, graph: InnerGraph, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    with no_torch_function():
        return graph.add_hook(x.output_nr, hook)


def register_hook(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.register_hook`: the hook gets a distributed gradient."""
    x, hook = (*args, *kwargs.values())
    inner = _inner_graph(x)
    if inner is not None:
        return _hook_within(x, inner, hook)
    graph = _local_graph_in_use(x)
    if graph is None:
        return call_torch(func, args, kwargs)
    x_spec = x._spec
    spec = x_spec.with_layout(x_spec.layout.cotangent())

    def call_hook(grad: Tensor) -> Tensor | None:
        recorded = torch.is_grad_enabled()
        distributed = FromLocal.apply(grad, spec, x_spec.layout) if recorded else wrap(grad, spec)  # type: ignore[no-untyped-call]
        out = hook(distributed)
        if out is None:
            return None
        out = redistribute(as_distributed(out, spec.layout), spec.layout)
        return ToLocal.apply(out, x_spec) if recorded else out._local_tensor  # type: ignore[no-untyped-call]

    if _may_have_two_sources(x):
        call_torch(func, args, kwargs)
    return graph.at_home().register_hook(call_hook)


def retain_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.retain_grad`."""
    inner = _inner_graph(args[0])
    if inner is not None:
        held = ref(args[0])  # the graph would hold itself

        def keep(grad: Tensor) -> None:
            x = held()
            if x is not None:
                x.grad = grad if x.grad is None else x.grad + grad

        _hook_within(args[0], inner, keep)
        return None
    graph = _local_graph_in_use(args[0])
    if graph is None:
        return call_torch(func, args, kwargs)
    if _may_have_two_sources(args[0]):
        call_torch(func, args, kwargs)
    return graph.at_home().retain_grad()


def _graph_with_gradient(x: Wrapper) -> LocalGraph | None:
    """The local graph of `x` if its local tensor retains its gradient, otherwise None."""
    graph = local_graph_of(x)
    return graph if graph is not None and graph.home is not None and _keeps_gradient(graph.home) else None


def _keeps_gradient(home: Tensor) -> bool:
    return home.retains_grad or getattr(home, "_asked", False)


def retains_grad(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """`Tensor.retains_grad`."""
    return _graph_with_gradient(args[0]) is not None or call_torch(func, args, kwargs)


def get_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.grad`."""
    x = args[0]
    graph = _graph_with_gradient(x)
    if graph is None:
        return call_torch(func, args, kwargs)
    assert graph.home is not None
    local, own = graph.home.grad, call_torch(func, args, kwargs) if _may_have_two_sources(x) else None
    if local is None:
        return own
    grad = _wrap_gradient(x, local)
    return grad if own is None else own + grad


def set_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`x.grad = ...`, `del x.grad`."""
    graph = _graph_with_gradient(args[0])
    if graph is not None and graph.home is not None:
        graph.home.grad = None
    return call_torch(func, args, kwargs)


def set_data(func: Function, args: Args, kwargs: Kwargs) -> None:
    """`x.data = value`: give `x` the layout and the local tensor of `value`, unseen by autograd.

    Raises:
        MixedError: `value` is a plain tensor.
    """
    x, value = args
    if not isinstance(value, Wrapper):
        raise MixedError(
            f"x.data = a plain torch.Tensor of shape {tuple(value.shape)}, of a distributed x: wrap it with "
            "distribute_tensor(value, x.device_mesh, x.placements), or DTensor.from_local if each rank has a part"
        )
    with no_torch_function():
        func(x, value)
    stored = stored_part(x)
    x._local_tensor, x._spec, x._local_graph, x._view_sync = value._local_tensor.detach(), value._spec, None, None
    if x._gradient_leaf is not None:
        x._gradient_leaf.layout = interned(x._spec.layout.cotangent())
    if stored is not None:
        stored.assign(x)


def grad_fn(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.grad_fn`: the node through which every gradient of the tensor passes."""
    graph = local_graph_of(args[0])
    if graph is None or _may_have_two_sources(args[0]):
        return call_torch(func, args, kwargs)
    return graph.at_home().grad_fn


def detach_(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.detach_`: drop the local graph, too."""
    out = call_torch(func, args, kwargs)
    args[0]._local_graph = None
    return out


def data(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.data`: a tensor that shares the memory, with a version counter of its own."""
    out, x = call_torch(func, args, kwargs), args[0]
    if type(out._local_tensor) is Tensor:
        local = out._local_tensor
        out._local_tensor = local.data
        out._local_tensor._view_syncs = shown_of(root_of(x)._local_tensor)
    return out


def gradient_sources(inputs: Sequence[Any]) -> list[list[Any]]:
    """For each input, the tensors whose gradients add up to the gradient of the input."""
    sources = []
    for x in map(successor, inputs):
        graph = _local_graph_in_use(x)
        home = [] if graph is None else [graph.at_home()]
        sources.append([x, *home] if not home or _may_have_two_sources(x) else home)
    return sources


def gradients(run: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.grad`; `run` is torch's function, for the tensors of `gradient_sources`."""
    options = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    for grad in _as_list(options.get("grad_outputs")):
        refuse_batched(grad, "torch.autograd.grad")
    if options.get("is_grads_batched") and not isinstance(options.get("inputs"), dict):
        return _stacked_gradients(run, options)
    if len(args) > 4 or isinstance(options.get("inputs"), dict | None):
        return run(*args, **kwargs)
    inputs = options["inputs"]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    inner = [_inner_graph(x) for x in inputs]
    if any(inner):
        return _gradients_within(run, options, inputs, inner)
    sources = gradient_sources(inputs)
    if all(len(source) == 1 and source[0] is x for source, x in zip(sources, inputs, strict=True)):
        return tuple(map(_distributed_as, inputs, run(*args, **kwargs)))
    options["inputs"] = [t for source in sources for t in source]
    unused = options.get("allow_unused")
    if any(len(source) > 1 for source in sources):
        options["allow_unused"] = True
    source_grads, out = iter(run(**options)), []
    for x, source in zip(inputs, sources, strict=True):
        grads = [
            _distributed_as(x, grad) if t is x or grad is None else _wrap_gradient(x, grad)
            for t in source
            for grad in [next(source_grads)]
        ]
        present = [grad for grad in grads if grad is not None]
        if not present and not (unused or options.get("materialize_grads")):
            raise RuntimeError(UNUSED)
        out.append(present[0] + present[1] if len(present) > 1 else present[0] if present else None)
    return tuple(out)


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
    """The stacked gradients for several gradients of the outputs (`is_grads_batched`), by one backward pass for each.

    Raises:
        ShapeError: there are none.
    """
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
    """`backward`; `run` is torch's function, for the tensors of `gradient_sources` if `inputs` are given."""
    inputs = kwargs.get("inputs")
    if inputs is None:
        return run(*args, **kwargs)
    inputs = inputs.values() if isinstance(inputs, dict) else inputs
    for x in [inputs] if isinstance(inputs, Tensor) else inputs:
        if _inner_graph(x) is not None:
            raise RuntimeError(
                "backward(inputs=...) with an activation in the middle of a rehearsed module: ask for its gradient by "
                "torch.autograd.grad, or run the module `with dshard.rehearsing(False):`"
            )
    sources = gradient_sources([inputs] if isinstance(inputs, Tensor) else list(inputs))
    for source in sources:
        if not isinstance(source[-1], Wrapper):
            source[-1]._asked = True
    return run(*args, **{**kwargs, "inputs": [t for source in sources for t in source]})


def _without_torch_function(handler: Handler) -> Handler:
    """`handler` with `__torch_function__` disabled; tensors without a local autograd graph go straight to torch."""
    of_inner = handler in (register_hook, retain_grad)

    def handle(func: Function, args: Args, kwargs: Kwargs) -> Any:
        cls = Wrapper.public
        with no_torch_function():
            x = args[0]
            if type(x) is cls and x._local_graph is None and not (of_inner and _inner_graph(x) is not None):
                return func(*args, **kwargs)
            return handler(func, args, kwargs)

    return handle


_GRAD: Any = Tensor.grad
_GRAD_FN: Any = Tensor.grad_fn
_RETAINS_GRAD: Any = Tensor.retains_grad
_HANDLERS: dict[object, Handler] = {
    Tensor.register_hook: register_hook,
    Tensor.retain_grad: retain_grad,
    _RETAINS_GRAD.__get__: retains_grad,
    _GRAD.__get__: get_grad,
    _GRAD.__set__: set_grad,
    _GRAD.__delete__: set_grad,
    _GRAD_FN.__get__: grad_fn,
    Tensor.detach_: detach_,
    torch.detach_: detach_,
}
GRAPH_FUNCTIONS = {func: _without_torch_function(handler) for func, handler in _HANDLERS.items()}
"""Handlers of functions that ask about a tensor's place in the graph, beside `gradients` and `accumulating`."""
