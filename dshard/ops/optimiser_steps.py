"""Steps of torch's optimisers on local tensors, fused by default on CPUs, and their states, laid out as parameters are.

Torch's optimisers ask each parameter for its gradient, type, device and states, and then run operators on lists of
these. Asked of distributed tensors, that takes longer than the operators themselves. Where the step is elementwise,
and gradients and states are laid out like their parameters, a copy of the optimiser whose parameters are local tensors
takes the same step, by torch's own code: each parameter is asked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import chain
from operator import attrgetter, is_
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dshard.autograd.crossing import redistribute
from dshard.comm import kernel_device
from dshard.core.observe import OBSERVERS
from dshard.core.operands import plain_value
from dshard.core.plain_tensors import alike_tensor
from dshard.core.replaced_parameters import Replaced, successor
from dshard.core.signature import Function
from dshard.core.spec import Spec
from dshard.core.torch_tensors import from_torch, is_torchs
from dshard.core.trees import replace_leaves
from dshard.core.view_sync import propagate_write
from dshard.core.wrapper import DISTRIBUTED, Wrapper, wrap
from dshard.layout import replicated
from dshard.torch_private import (
    increment_version,
    is_transforming,
    n_dispatch_modes,
    n_function_modes,
    no_torch_function,
    state_like_parameter,
)

Step: TypeAlias = Callable[[Any], object]

_FUSED: frozenset[type[Optimizer]] = frozenset({SGD, Adagrad, Adam, AdamW})
"""The optimisers for which torch has fused operators on a CPU."""
ELEMENTWISE = _FUSED | {ASGD, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop}
"""The optimisers of torch whose step computes each element of a parameter from that of its gradient and its states."""

_GRAD: Any = Tensor.grad
_gradient_of, _is_meta, _version_of, _origin_of = map(attrgetter, ("grad", "is_meta", "_version", "_view_sync"))


def support_local_steps() -> None:
    """Replace the `step` of the optimisers, below the hooks of steps."""
    kind: Any
    for kind in ELEMENTWISE:
        step: Any = vars(kind).get("step")  # AdamW has Adam's until one is made
        if step is None:
            continue
        is_profiled = hasattr(step.__wrapped__, "__wrapped__")  # around torch's `no_grad`, once an optimiser was made
        replaced: Any = _by_local_tensors(step.__wrapped__ if is_profiled else step)
        if is_profiled:
            replaced = Optimizer.profile_hook_step(replaced)
            replaced.hooked = True
        kind.step = replaced


def _by_local_tensors(step: Step) -> Callable[..., object]:
    @wraps(step)
    def stepped(self: Optimizer, closure: Callable[[], object] | None = None) -> object:
        if is_compiling() or is_transforming() or not _has_parameters(self):
            return step(self) if closure is None else step(self, closure)  # type: ignore[call-arg]
        loss = None
        if closure is not None:  # before the gradients are read
            with torch.enable_grad():
                loss = closure()
        groups = _with_fused_by_default(self)
        is_watched = OBSERVERS or n_dispatch_modes() or n_function_modes()
        local = None if is_watched or type(self) not in ELEMENTWISE else _local_step(self, groups)
        if local is not None:
            local.run(step)
            return loss
        with _distributed_gradients(step, groups):
            if groups is self.param_groups:
                step(self)
            else:
                _step_of_copy(step, self, groups, self.state)
        return loss

    return stepped


def _has_parameters(optimizer: Optimizer) -> bool:
    """Whether a parameter is distributed."""
    cls = Wrapper.public
    return any(cls in map(type, group["params"]) for group in optimizer.param_groups)


@contextmanager
def _distributed_gradients(step: Step, groups: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Give distributed parameters whose gradient is plain a distributed one, so that states made of it are, too.

    Momenta made of plain gradients would be plain, and torch's fused steps make them without values, other ones on each
    rank.
    """
    with no_torch_function():
        all_given = [(p, p.grad) for group in groups for p in group["params"] if isinstance(p, Wrapper)]
    given = [(p, g) for p, g in all_given if g is not None and not isinstance(g, DISTRIBUTED) and not g.requires_grad]
    for p, grad in given:
        alike = alike_tensor(step, grad, p._spec.layout.mesh)  # which the ranks compare
        p.grad = _like(p, grad if alike is None else alike)  # type: ignore[assignment]
    try:
        yield
    finally:
        for p, grad in given:
            p.grad = grad


def _step_of_copy(step: Step, optimizer: Optimizer, groups: list[dict[str, Any]], states: Any) -> None:
    """Step a copy of the optimiser with other groups and states; attributes that the step sets are the optimiser's."""
    copy, attributes = object.__new__(type(optimizer)), vars(optimizer)
    vars(copy).update(attributes, param_groups=groups, state=states)
    step(copy)
    attributes.update(vars(copy), param_groups=optimizer.param_groups, state=optimizer.state)


def _with_fused_by_default(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimiser's groups; those for which the user has not said how to step are fused.

    One operator then updates all local tensors, while torch's default on a CPU calls several for each.
    """
    groups, n = optimizer.param_groups, len(optimizer.state)
    if type(optimizer) not in _FUSED or not any(map(_leaves_open, groups)):
        return groups
    if type(optimizer) is SGD and n and n < sum(len(group["params"]) for group in groups):
        return groups  # torch's fused operator takes no momenta of some parameters alone
    return [{**group, "fused": True} if _leaves_open(group) else group for group in groups]


def _leaves_open(group: dict[str, Any]) -> bool:
    """Whether the user has not said how to step, and all parameters are distributed, on a CPU, and of full precision.

    In half precision torch's fused step of SGD on a CPU leaves most elements as they were.
    """
    if group.get("fused") is not None or group.get("foreach") is not None:
        return False
    if group.get("differentiable") or group.get("capturable"):
        return False
    cls = Wrapper.public
    if not {cls}.issuperset(map(type, group["params"])):
        return False
    specs = {p._spec for p in group["params"]}  # torch would ask each tensor
    return all(kernel_device(spec.device) == "cpu" and spec.dtype in (torch.float32, torch.float64) for spec in specs)


@dataclass(slots=True)
class _LocalStep:
    """A step on the local tensors of the parameters that have a gradient, of their gradients, and of their states.

    `states` are keyed by the local tensors of the parameters; `written` are the distributed parameters and states.
    """

    optimizer: Optimizer
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: dict[Tensor, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    parameters: list[Wrapper] = field(default_factory=list)
    gradients: list[Wrapper] = field(default_factory=list)
    written: list[Wrapper] = field(default_factory=list)

    def add(self, group: dict[str, Any]) -> bool:
        """Add a group; false if gradients or states are not laid out like their parameters."""
        params, cls, written, local_params = group["params"], Wrapper.public, self.written, []
        if group.get("differentiable") or _has_distributed(group.values()) or not {cls}.issuperset(map(type, params)):
            return False
        with no_torch_function():
            gradients = list(map(_GRAD.__get__, params))
        for p, gradient, states in zip(params, gradients, map(self.optimizer.state.get, params), strict=True):
            if gradient is None:
                continue
            spec = p._spec
            if type(gradient) is not cls or gradient._spec is not spec or spec.has_partial:
                return False
            if not (states or spec.shape):  # no new states that look like numbers
                return False
            local = p._local_tensor
            own = self.states[local] = dict(states or ())
            for name, value in own.items():
                if type(value) is cls:
                    if value._spec is not spec and not _is_laid_out_like(spec, value._spec):
                        return False
                    written.append(value)
                    own[name] = value._local_tensor
                elif isinstance(value, Tensor) and (type(value) is not Tensor or value.dim()):
                    return False
            local_params.append(local)
            self.parameters.append(p)
            self.gradients.append(gradient)
        self.groups.append({**group, "params": local_params})
        return True

    def is_all(self) -> bool:
        """Whether the local tensors are all that the step reads and writes, each of a parameter of its own."""
        self.written += self.parameters
        tensors = [t._local_tensor for t in (*self.written, *self.gradients)]
        gradients = tensors[len(self.written) :]
        return (
            len(self.states) == len(self.parameters)
            and not any(map(is_, self.states, gradients))
            and {Tensor}.issuperset(map(type, tensors))
            and not any(map(_origin_of, self.written))
            and not any(map(_is_meta, self.states))
            and not any(map(Tensor.is_inference, gradients))
            and {NoneType}.issuperset(map(type, map(_gradient_of, self.states)))
            # torch's fused kernels pair elements by their place in memory
            and (not any(group.get("fused") for group in self.groups) or all(map(Tensor.is_contiguous, tensors)))
        )

    def run(self, step: Step) -> None:
        """Step, count the writes, and keep the states that were made."""
        gradients = [gradient._local_tensor for gradient in self.gradients]
        locals, versions, given = list(self.states), list(map(_version_of, gradients)), _values(self.states)
        try:
            for local, gradient in zip(locals, gradients, strict=True):
                local.grad = gradient
            _step_of_copy(step, self.optimizer, self.groups, self.states)
        finally:
            for local in locals:
                local.grad = None
            # torch counts no writes by its fused operators
            pairs = zip(self.gradients, versions, map(_version_of, gradients), strict=True)
            increment_version([*self.written, *locals, *[gradient for gradient, before, now in pairs if now != before]])
            propagate_write([t for t in self.written if hasattr(t._local_tensor, "_view_syncs")], step)
            values = _values(self.states)
            if len(values) != len(given) or not all(map(is_, values, given)):
                self._keep_new_states()

    def _keep_new_states(self) -> None:
        """Lay out the states that the step has made like their parameters, if they have their shape."""
        for p, (local, own) in zip(self.parameters, self.states.items(), strict=True):
            for name, value in own.items():
                states = self.optimizer.state[p]
                known = states.get(name)
                if value is not (known._local_tensor if isinstance(known, Wrapper) else known):
                    is_laid_out = isinstance(value, Tensor) and value.dim() and value.shape == local.shape
                    states[name] = wrap(value, p._spec.with_dtype(value.dtype)) if is_laid_out else value


def _local_step(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> _LocalStep | None:
    """The step on local tensors, or None where it would not be the step of the distributed ones."""
    step = _LocalStep(optimizer)
    scales = vars(optimizer).values()  # of gradients, by a gradient scaler
    return step if not _has_distributed(scales) and all(map(step.add, groups)) and step.is_all() else None


def _has_distributed(options: Iterable[object]) -> bool:
    """Whether there is a distributed tensor among options, or in one of them."""
    cls = Wrapper.public
    flat = chain.from_iterable([x if type(x) is tuple else (x,) for x in options])
    return cls in map(type, flat)


def _is_laid_out_like(parameter: Spec, state: Spec) -> bool:
    if state.shape == parameter.shape:
        return state.layout == parameter.layout
    return not state.shape and state.layout.is_replicated()


def _values(states: dict[Tensor, dict[str, Any]]) -> list[object]:
    return list(chain.from_iterable(map(dict.values, states.values())))


def support_states() -> None:
    """Let `Optimizer.load_state_dict` convert loaded values to the class of their parameter.

    torch's functions for state dicts pass it tensors of torch's class, checkpoints of one device plain ones. The
    function of torch that gives each value the dtype and the device of its parameter is replaced.
    """
    if state_like_parameter is not None:
        name = state_like_parameter.__name__
        setattr(Optimizer, name, staticmethod(_distributed_as_the_parameter(state_like_parameter)))
    register_optimizer_step_pre_hook(_follow_parameters)


def _follow_parameters(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Put the successors of parameters that were replaced into an optimiser made before, with their states laid out."""
    if getattr(optimizer, "_dshard_followed", 0) == Replaced.number:
        return
    optimizer._dshard_followed = Replaced.number  # type: ignore[attr-defined]
    taken: dict[int, Tensor] = {}  # of two objects that are one parameter the first counts
    for group in optimizer.param_groups:
        parameters = {id(p): p for p in map(successor, group["params"]) if id(p) not in taken}
        group["params"][:] = parameters.values()
        taken |= parameters
    for old in [p for p in optimizer.state if successor(p) is not p]:
        new = successor(old)
        optimizer.state[new] = replace_leaves(optimizer.state.pop(old), partial(_like, new))


def _distributed_as_the_parameter(process: Function) -> Function:
    @wraps(process)
    def processed(param: Tensor, value: Tensor, *rest: object, **named: object) -> object:
        return _like(param, process(param, value, *rest, **named))

    return processed


def _like(param: object, value: object) -> object:
    """`value`, a state of `param`, as a tensor of the same class, laid out as `param` where it has its shape."""
    if not isinstance(value, Tensor):
        return value
    if is_torchs(param):
        to_torch: Any = Wrapper.public.to_torch  # type: ignore[attr-defined]  # of the class above this module
        return to_torch(value) if isinstance(value, Wrapper) else value
    if not isinstance(param, Wrapper):
        return plain_value("load_state_dict", value) if isinstance(value, Wrapper) else value
    if isinstance(value, DISTRIBUTED):
        x: Wrapper = from_torch(value) if is_torchs(value) else value  # type: ignore[assignment]
        layout, own = param._spec.layout, x._spec.layout
        target = layout if x.shape == param.shape else own if own.mesh == layout.mesh else replicated(layout.mesh)
        return x if own == target else redistribute(x.detach(), target)
    if not value.dim():
        return value
    if value.shape == param.shape:
        return torch.empty_like(param.detach(), dtype=value.dtype).copy_(value.detach())
    return Wrapper.public.from_local(value, param.device_mesh)
