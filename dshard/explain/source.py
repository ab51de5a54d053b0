"""`explain_source`: an expression over described tensors, or a function in a file, explained."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from dshard.core.signature import Function
from dshard.core.spec import contiguous_spec
from dshard.errors import DShardError, NotationError
from dshard.explain.explain_calls import explain
from dshard.explain.report_values import Report
from dshard.layout import Layout, Shape, parse_layout
from dshard.mesh import Mesh
from dshard.placements import parse_placements
from dshard.tensor import DTensor
from dshard.validate import check_type, suggestion

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}
_TENSOR = re.compile(r"\s*(\w+)\s*:\s*(\d+(?:x\d+)*)\s+(?:([a-z]\w*)\s+)?(\S.*)")
_FUNCTION = re.compile(r"(.+\.py|[\w.]+):([A-Za-z_]\w*)")


def parse_dtype(text: str) -> torch.dtype:
    """The dtype that `text` names, as torch does or in short.

    >>> parse_dtype("bf16"), parse_dtype("int64")
    (torch.bfloat16, torch.int64)
    """
    dtype = getattr(torch, SHORT.get(text, text), None) if isinstance(text, str) else text
    if not isinstance(dtype, torch.dtype):
        names = [*SHORT, *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))]
        raise NotationError(
            f"{text!r} is no dtype: use one of {', '.join(SHORT)}, or a name of torch's such as int64"
            f"{suggestion(text, names)}"
        )
    return dtype


def read_layout(text: str, mesh: Mesh) -> Layout:
    """The layout that `text` writes; the names of the mesh axes may be left out.

    >>> str(read_layout("S(0) R", Mesh((2, 2), ("dp", "tp"))))
    'dp:S(0) tp:R'
    """
    check_type(text, str, "a layout", "write one, as in 'S(0) R'", NotationError)
    return parse_layout(text, mesh) if ":" in text else Layout(mesh, parse_placements(text))


def describe_tensor(text: str, mesh: Mesh, dtype: torch.dtype) -> tuple[str, DTensor]:
    """The name and tensor that "name: SIZES PLACEMENTS" describes, without data; a dtype may follow the sizes.

    >>> name, x = describe_tensor("x: 4096x8192 S(0) R", Mesh((2, 4), ("dp", "tp")), torch.bfloat16)
    >>> name, tuple(x.shape), x.dtype, x.placements
    ('x', (4096, 8192), torch.bfloat16, (Shard(dim=0), Replicate()))
    """
    match = _TENSOR.fullmatch(text)
    if match is None or not match[1].isidentifier():
        raise NotationError(
            f"{text!r} describes no tensor: write its name, sizes and placements, one for each mesh axis, as in "
            "'x: 4096x8192 S(0) R'"
        )
    name, sizes, kind, placements = match.groups()
    layout = read_layout(placements, mesh)
    return name, _meta(layout, tuple(map(int, sizes.split("x"))), dtype if kind is None else parse_dtype(kind))


def _meta(layout: Layout, shape: Shape, dtype: torch.dtype) -> DTensor:
    layout.check(shape)
    local = torch.empty(layout.largest_shape(shape), dtype=dtype, device="meta")
    return DTensor._wrap(local, contiguous_spec(layout, shape, dtype, local.device))


def explain_source(source: str, tensors: Mapping[str, DTensor]) -> Report:
    """Explain an expression over these tensors, `torch` and `F`; or a function, as "file.py:name" or "module:name".

    A function gets the tensors whose names are those of its parameters.
    """
    check_type(source, str, "what to explain", "write an expression such as 'x @ w', or 'file.py:name'", NotationError)
    match = _FUNCTION.fullmatch(source.strip())
    if match is None:
        return _run(source, _expression(source, tensors))
    function = load_function(match[1], match[2])
    return _run(source, function, **_arguments(source, function, tensors))


def _run(source: str, function: Function, **arguments: object) -> Report:
    try:
        return explain(function, **arguments)
    except DShardError:
        raise
    except Exception as error:
        raise DShardError(f"{source}: {type(error).__name__}: {error}") from error


def _expression(source: str, tensors: Mapping[str, DTensor]) -> Callable[[], Any]:
    try:
        code = compile(source.strip(), "<expression>", "eval")
    except SyntaxError as error:
        raise NotationError(
            f"{source!r} is no expression ({error.msg}): write one such as 'x @ w' or 'F.gelu(x @ w)', or name a "
            "function, as in 'model.py:step'"
        ) from error
    names: dict[str, object] = {"torch": torch, "F": F, **tensors}

    def run() -> Any:
        try:
            return eval(code, dict(names))  # a copy, for eval adds Python's own names
        except NameError as error:
            raise NotationError(f"{source!r}: {error}; there are {', '.join(names)}") from error

    return run


def load_function(path: str, name: str) -> Function:
    """The function of this name in a module, or a file that ends with .py."""
    try:
        module = _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except DShardError:
        raise
    except Exception as error:  # whatever the user's file raises
        raise NotationError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise NotationError(f"{path} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NotationError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as if it were run: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def _arguments(source: str, function: Function, tensors: Mapping[str, DTensor]) -> dict[str, DTensor]:
    parameters = inspect.signature(function).parameters
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise NotationError(
            f"{source} needs {', '.join(missing)}: describe each tensor, as in '{missing[0]}: 4096x8192 S(0) R'"
        )
    return {name: tensor for name, tensor in tensors.items() if name in parameters}
