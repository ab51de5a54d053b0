"""Functions that stand in a graph of torch.compile as one call, and frames that it skips."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch.autograd import Function
from torch.compiler import is_dynamo_compiling
from typing_extensions import ParamSpec

from dshard.compile import FUNCTIONS
from dshard.placements import Partial, Replicate, Shard
from dshard.placements.types import TORCH_TWINS
from dshard.torch_private import FrameAction, FrameExecStrategy, register_custom_class, set_code_exec_strategy

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., object])
_NAMES: dict[tuple[Callable[..., object], tuple[object, ...]], str] = {}


def as_graph_function(function: Callable[..., object], *values: object) -> str:
    """Register `function` with these first arguments, and return the name under which a graph may call it."""
    name = _NAMES.setdefault((function, values), f"{function.__name__} {len(_NAMES)}")
    FUNCTIONS[name] = partial(function, *values)
    return name


def as_graph_functions(function: Callable[..., object], value: object, others: Iterable[_T]) -> dict[_T, str]:
    """The name under which a graph may call `function(value, other)`, for each of `others`."""
    return {other: as_graph_function(function, value, other) for other in others}


def call_in_graph(name: str, *args: object, **kwargs: object) -> Any:
    """Call a function of `FUNCTIONS` by its name; under torch.compile it becomes one call in the graph."""
    if is_dynamo_compiling():
        from dshard.compile import graph  # noqa: PLC0415  # it imports torch._dynamo, which takes long

        graph.guard()
        return graph.call(name, *args, **kwargs)
    return FUNCTIONS[name](*args, **kwargs)


def traceable(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `function` so that torch.compile records it as one call, guarded by the current planning settings."""
    name = function.__name__
    FUNCTIONS[name] = function

    @wraps(function)
    def front(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if is_dynamo_compiling():
            out: _T = call_in_graph(name, *args, **kwargs)
            return out
        return function(*args, **kwargs)

    return front


def skip_frame(function: _F) -> _F:
    """Keep torch.compile from compiling `function` and its callees unless their caller is compiled.

    Otherwise torch.compile would try to compile it by itself after a graph break. torch.compiler.disable says the same,
    but wraps the function, and imports torch._dynamo, which takes long.
    """
    if set_code_exec_strategy is not None:
        codes = [function.__code__]
        for code in codes:
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]  # functions within, such as hooks
    return function


def skip_frames(cls: type[object]) -> None:
    """Apply `skip_frame` to all methods of `cls`."""
    for member in vars(cls).values():
        function = getattr(member, "__func__", member)
        if isinstance(function, FunctionType) and function.__code__ is not _FRONT:
            skip_frame(function)


def skip_frames_of_nodes(package: str) -> None:
    """Apply `skip_frame` to the functions and classes of a package's modules, and to all nodes of dshard.

    Autograd's engine calls them where a compiled region calls `backward`, so no skipped caller is above them.
    """
    nodes = {cls for cls in Function.__subclasses__() if cls.__module__.startswith("dshard.")}
    for module in [each for name, each in sys.modules.items() if name.startswith(f"{package}.")]:
        own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
        nodes.update(each for each in own if isinstance(each, type))
        for function in own:
            if isinstance(function, FunctionType) and function.__code__ is not _FRONT:
                skip_frame(function)
    for cls in nodes:
        skip_frames(cls)


_FRONT = traceable(skip_frames).__code__  # shared by all fronts, which torch.compile must trace
del FUNCTIONS[skip_frames.__name__]


def _fx_repr(placement: object) -> tuple[str, dict[str, type]]:
    return repr(placement), {kind.__name__: kind for kind in (Shard, Replicate, Partial)}


# `x.placements` may be read within a compiled region: torch writes a value of a registered type into the code of a
# graph, and asks its class for the text. It is set here, for the classes themselves know nothing of torch.
for _kind in TORCH_TWINS:
    setattr(_kind, "__fx_repr__", _fx_repr)  # noqa: B010
    with suppress(AttributeError, TypeError):  # torch 2.11 calls it otherwise, and reads no placements there
        is_renamed = register_custom_class.__name__ == "register_custom_class"  # as from torch 2.15 on
        register_custom_class(_kind, typ="constant" if is_renamed else "value")
