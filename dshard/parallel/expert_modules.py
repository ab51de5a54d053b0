"""Modules that are a layer of experts, run as the one operator `dshard.experts`: their own forward is its body.

Such a module's `forward(x, index, weight)` sums over the experts of each token, and its parameters have a dim of
experts. While the model that holds it is traced, priced or parallelized, its class is one that derives from its own.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from dshard.caches import cached
from dshard.errors import LayoutError
from dshard.functional import ExpertBody, experts
from dshard.ops.experts.local_experts import Body
from dshard.rules.expert_loops import OPERANDS, check_expert_rule
from dshard.validate import check_type

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object


class ExpertsForm(NamedTuple):
    """How a module is a layer of experts: its parameters' names, their rule, and attributes that count experts.

    The body sets each of `counts` to the number of experts of the rank.
    """

    parameters: tuple[str, ...]
    rule: str
    counts: tuple[str, ...] = ()


RECOGNISED: dict[str, Callable[[nn.Module], ExpertsForm | None]] = {}
"""Functions that tell modules of other libraries, by an attribute of these; `dshard.parallel.integrations` has them."""
_REGISTERED: dict[type[nn.Module], ExpertsForm] = {}


def register_experts(
    cls: type[nn.Module], rule: str, *, parameters: Sequence[str] | None = None, counts: Sequence[str] = ()
) -> None:
    """Teach `parallelize` a class of modules that are layers of experts.

    Its `forward(x, index, weight)` takes tokens (..., d), the experts of each (..., k) and their weights (..., k), and
    returns the sum over the experts of each token (..., d). `rule` has a term for each of the `parameters`, by default
    all of the module's own in their order, as `dshard.experts` reads it: "e f d, e d f".

    A rank calls the class's own `forward` on pairs of a row and one of its experts: rows (n, d), experts (n, 1) counted
    from 0, and weights (n, 1) of one. By then the module has the rank's parts of its parameters, and its attributes
    `counts` are the number of its experts. The call must depend on nothing else that experts differ in.

    Raises:
        NotationError: a term for each parameter is missing, or one without e, or with another name.

    >>> dshard.parallel.register_experts(GroupedExperts, "e f d, e d f, e f d")  # doctest: +SKIP
    """
    check_type(cls, type, "the class of modules", "give a class that derives from nn.Module")
    names = None if parameters is None else tuple(parameters)
    check_expert_rule(rule, rule.count(",") + 1 if names is None else len(names))
    _REGISTERED[cls] = ExpertsForm(names or (), rule, tuple(counts))


def experts_form(module: nn.Module) -> ExpertsForm | None:
    """How a module is a layer of experts; None for other modules."""
    if isinstance(module, ExpertsModule):
        return None
    for cls in type(module).__mro__:
        if cls in _REGISTERED:
            known = _REGISTERED[cls]
            return known._replace(parameters=known.parameters or _own(module))
    marked = (recognise(module) for mark, recognise in RECOGNISED.items() if mark in module.__dict__)
    return next((form for form in marked if form is not None), None)


def _own(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, p in module._parameters.items() if p is not None)


class ExpertsModule(_Module):
    """The mixin of a module that is a layer of experts, before the module's own class."""

    experts_class: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The sum over the experts of each token, as one operator."""
        own, form = self.experts_class, self.__dict__["_experts_form"]
        x, index, weight = args if len(args) == OPERANDS else _arguments(own).bind(self, *args, **kwargs).args[1:]
        parameters = [getattr(self, name) for name in form.parameters]  # which may be parametrized by now
        in_graph = self.__dict__["_experts_body"] if is_dynamo_compiling() else None
        body = in_graph or partial(_body, self, own, form)
        return experts(body, x, index, weight, *parameters, rule=form.rule)


@cached("experts modules", 64)
def _arguments(cls: type[nn.Module]) -> inspect.Signature:
    """The parameters of the forward of a class: itself, tokens, indices and weights."""
    signature = inspect.signature(cls.forward)
    if len(signature.parameters) != 1 + OPERANDS:
        raise LayoutError(
            f"{cls.__name__}.forward{signature} of a layer of experts: give it the arguments x, index and weight; in "
            "another module call dshard.experts itself"
        )
    return signature


def _body(
    module: nn.Module, own: type[nn.Module], form: ExpertsForm, rows: Tensor, ends: Tensor, *parameters: Tensor
) -> Any:
    """The module's own forward on pairs of a row and the expert of it that this rank has, counted from 0."""
    held = ends.shape[0]
    steps = torch.arange(len(rows), device=rows.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, steps, right=True).clamp(max=held - 1)  # rows behind the last end do not count
    local = object.__new__(own)
    local.__dict__.update(module.__dict__)
    local.__dict__.update(dict.fromkeys(form.counts, held))
    local.__dict__["_parameters"] = {**module._parameters, **dict(zip(form.parameters, parameters, strict=True))}
    return own.forward(local, rows, expert.unsqueeze(1), rows.new_ones(len(rows), 1))


def run_as_operators(model: nn.Module, in_graphs: bool = True) -> list[nn.Module]:
    """Let each layer of experts in `model` run as one operator, also `in_graphs` of torch.compile; the modules."""
    found = [(module, form) for module in model.modules() if (form := experts_form(module)) is not None]
    for module, form in found:
        cls = type(module)
        _arguments(cls)
        module.__class__ = own = derived(ExpertsModule, cls)
        own.experts_class = cls
        module.__dict__["_experts_form"] = form
        module.__dict__["_experts_body"] = ExpertBody(_body_in_graphs(module, cls, form)) if in_graphs else None
    return [module for module, _ in found]


def _body_in_graphs(module: nn.Module, cls: type[nn.Module], form: ExpertsForm) -> Body:
    """The body of a module, which graphs may keep for ever: it holds none of its parameters."""
    empty = object.__new__(cls)
    empty.__dict__.update(module.__dict__)
    empty.__dict__["_parameters"] = dict.fromkeys(module._parameters)
    return partial(_body, empty, cls, form)


@contextmanager
def experts_as_operators(model: nn.Module) -> Iterator[None]:
    """Within the block each layer of experts in `model` runs as one operator."""
    modules: list[Any] = run_as_operators(model, in_graphs=False)
    try:
        yield
    finally:
        for module in modules:
            module.__class__ = module.experts_class
            del module.__dict__["_experts_form"], module.__dict__["_experts_body"]


# -- classes that derive from those of modules, by the same names

_DERIVED: dict[tuple[type, type], Any] = {}


def derived(mixin: type, cls: type) -> Any:
    """The class of the name of `cls` that derives from `mixin` and `cls`, the same one each time."""
    if (mixin, cls) not in _DERIVED:
        _DERIVED[mixin, cls] = newly_derived(mixin, cls)
    return _DERIVED[mixin, cls]


def newly_derived(mixin: type, cls: type) -> type:
    """A class of the name of `cls` that derives from `mixin` and `cls`."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), names)
