"""Private names of torch stand in `dshard/torch_private.py` alone, and an import without one says what is lost."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from helpers.sources import PACKAGE, SOURCES, nodes, parsed

from dshard import DTensor, torch_private
from dshard.dispatch import function_table
from dshard.ops.random import state
from dshard.torch_private import NAMES, PROTOCOLS, PrivateName, late

TABLE = PACKAGE / "torch_private.py"
FILES = [path for path in SOURCES if path != TABLE]
PYTHONS = {"sys", "_sys", "os", "argparse"}
"""Modules of Python whose private names are no concern of the table."""
RECORDS = {"_replace"}  # of named tuples
OPERATORS = (torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional)
TEXT = re.compile(r"torch(?:\.\w+)*\._[a-zA-Z]\w*(?:\.\w+)*")


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to functions, classes, variables, attributes and slots."""
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from (item.value for item in ast.walk(value) if isinstance(item, ast.Constant))


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@cache
def ours() -> frozenset[str]:
    return frozenset(name for path in FILES for name in defined(parsed(path)))


ATTRIBUTES = {name.rpartition(".")[2] for name in NAMES}


def is_operator(name: str) -> bool:
    return name == "_c10d_functional" or any(hasattr(space, name) for space in OPERATORS)


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names of torch that a file uses, beside attributes in the table and operators."""
    for node in nodes(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                for alias in names:
                    if any(map(private, (*module.split("."), alias.name))):
                        yield f"{module}.{alias.name}"
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.startswith("torch.") and "._" in alias.name)
            case ast.Attribute(attr=name) if private(name) and root(node) not in PYTHONS:
                is_torch = root(node) in ("torch", "dist", "Tensor", "F")
                is_known = name in ATTRIBUTES | RECORDS or not (is_torch or name not in ours())
                if not is_known and not is_operator(name):
                    yield ast.unparse(node)
            case ast.Constant(value=str(text)) if "\n" not in text:
                yield from (path for path in TEXT.findall(text) if path not in NAMES)


def test_a_private_name_of_torch_is_in_the_table() -> None:
    assert [(path, name) for path in FILES for name in private_names(parsed(path))] == []


@pytest.mark.parametrize(
    "code",
    [
        "from torch._ops import OpOverload",
        "from torch.distributed.device_mesh import _mesh_resources",
        "import torch._dynamo",
        "torch._C._increment_count(x)",
        "x.untyped_storage()._weak_ref()",
        "import_module('torch._dynamo.eval_frame')",
    ],
)
def test_every_use_of_a_private_name_is_seen(code: str) -> None:
    assert list(private_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["x._version", "torch.ops.aten._softmax.default", "sys._getframe(1)", "x._local_tensor"]
)
def test_other_names_are_not_mistaken_for_one(code: str) -> None:
    assert list(private_names(ast.parse(code))) == []


def test_every_name_in_the_table_is_used() -> None:
    sources = "\n".join(path.read_text() for path in FILES)
    aliases = {
        node.target.id if isinstance(node, ast.AnnAssign) else node.targets[0].id  # type: ignore[attr-defined]
        for node in ast.walk(parsed(TABLE))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") in ("_needed", "_optional")
    }
    bound = {path for path, name in NAMES.items() if path not in sources}
    attributes = {path.rpartition(".")[2] for path in bound}

    assert {alias for alias in aliases if not re.search(rf"\b{alias}\b", sources)} == set()
    assert len(aliases) + sum(f".{name}" in sources or f'"{name}"' in sources for name in attributes) >= len(bound)


def test_every_name_says_what_it_is_for_and_is_in_this_torch() -> None:
    assert torch_private.MISSING == []
    assert all(name.use and name.path.startswith("torch.") for name in NAMES.values())


def test_the_methods_that_torch_calls_are_listed() -> None:
    pythons = {name for kind in (object, int, torch.nn.Module, type(len)) for name in dir(kind)} | {"__deepcopy__"}
    ours = {name for name in vars(DTensor) if name.startswith("__")} - pythons - {"__annotations__", "__module__"}

    assert ours <= PROTOCOLS.keys()
    assert all(any(name in path.read_text() for path in FILES) for name in PROTOCOLS)


# -- a torch without one


def imported_without(name: str, then: str = "") -> subprocess.CompletedProcess[str]:
    """`import dshard` in a process whose torch lacks a name."""
    module, _, attribute = name.rpartition(".")
    code = (
        f"import importlib, torch\ndelattr(importlib.import_module({module!r}), {attribute!r})\nimport dshard\n{then}"
    )
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_a_missing_name_says_what_does_not_work_without_it() -> None:
    name = NAMES["torch._C._will_engine_execute_node"]

    done = imported_without(name.path)

    assert done.returncode == 1
    error = done.stderr.partition("\nImportError: ")[2]
    assert error.startswith(f"torch {torch.__version__} lacks private names that dshard needs:\n")
    assert f"  {name.path}, for {name.use}\n" in error
    assert "dshard was tested with torch 2.13: install that, or a dshard for your torch" in error


@pytest.mark.thorough
def test_without_an_optional_name_dshard_works() -> None:
    path = "torch._C._dynamo.eval_frame.set_code_exec_strategy"

    done = imported_without(path, "print(*(name.path for name in dshard.torch_private.MISSING))")

    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr


def test_a_missing_name_of_a_late_module_is_refused_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "torch.distributed.checkpoint._no_such.name"
    monkeypatch.setitem(NAMES, path, PrivateName(path, "loading checkpoints"))

    with pytest.raises(ImportError, match=r"_no_such\.name, for loading checkpoints"):
        late(path)


# -- names that are there and mean something else


def test_a_generator_with_another_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_write_to", lambda generator, word: generator.manual_seed(word))

    with pytest.raises(ImportError, match="keeps the state of its CPU generator otherwise than dshard knows"):
        state._check_state()


def test_another_backward_is_refused() -> None:
    def backward(tensors: object) -> None:
        """A function that does not ask `has_torch_function`."""

    with pytest.raises(ImportError, match=r"\.backward of torch .* is not the function that dshard"):
        function_table.keeping_torch_function(backward)
