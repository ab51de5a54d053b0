"""What the import contract in pyproject.toml cannot say: which part of torch is imported, and where in a file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from helpers.sources import PACKAGE, SOURCES, nodes, parsed

import dshard

MAY_IMPORT_DISTRIBUTED = frozenset(
    {
        *("comm", "testing", "launch", "checkpoint", "torch_private", "torch_dtensor"),
        *("tools/demo", "tools/nccl_contract"),
    }
)
MAY_IMPORT_RICH = ("tools/report",)

# Functions that may import, as "dshard/file.py: function". Each needs a reason beside it.
MAY_IMPORT_LATE = frozenset(
    {
        "dshard/comm/stored_chunks.py: _torch",  # torch.distributed.checkpoint takes a second to import
        "dshard/comm/graph_collectives.py: split_graph",  # torch.distributed.pipelining takes seconds to import
        "dshard/checkpoint/tensor_files.py: _library",  # safetensors is an extra
        "dshard/compile/graph_functions.py: call_in_graph",  # torch._dynamo takes long, and is there already
    }
)

# What importing dshard may load beyond torch, and which layers it leaves until they are asked for.
MAY_LOAD = frozenset(
    {
        "torch.distributed._functional_collectives",
        "torch.distributed._functional_collectives_impl",
        "torch.distributed._local_tensor",
        "torch.distributed._local_tensor._c10d",
        *("torch.fx.experimental._constant_symnode", "torch.nested._internal", "torch.nested._internal.nested_int"),
    }
)
LATE_LAYERS = frozenset(
    {
        *("calibrate", "debug", "report", "selftest", "tools", "testing", "launch", "simulate"),
        *("parallel", "pipeline", "checkpoint", "experimental"),
    }
)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that the code imports, and torch.distributed where it is reached as an attribute."""
    for node in nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                yield "torch.distributed"


def late_importers(tree: ast.AST) -> set[str]:
    """The names of the functions with an import in their body."""
    return {
        function.name
        for function in nodes(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))
    }


def imports(tree: ast.AST, package: str) -> bool:
    """Whether the code imports a package or anything in it."""
    return any(name == package or name.startswith(package + ".") for name in imported(tree))


def layer(path: Path) -> str:
    """The layer a file of the package belongs to; of the tools, which tool."""
    first, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    return f"{first}/{rest[0]}" if first == "tools" else first


def importers(package: str) -> list[Path]:
    """The files that import a package."""
    return [path for path in SOURCES if imports(parsed(path), package)]


def test_one_door_to_torch_distributed() -> None:
    assert [path for path in importers("torch.distributed") if layer(path) not in MAY_IMPORT_DISTRIBUTED] == []


def test_only_the_report_imports_rich() -> None:
    assert [path for path in importers("rich") if layer(path) not in MAY_IMPORT_RICH] == []


def test_imports_stand_at_the_top() -> None:
    found = {
        f"dshard/{path.relative_to(PACKAGE).as_posix()}: {name}"
        for path in SOURCES
        for name in late_importers(parsed(path))
    }

    assert found - MAY_IMPORT_LATE == set()


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed",
        "import torch.distributed.tensor as dt",
        "from torch import distributed as dist",
        "from torch.distributed import all_reduce",
        "from torch.distributed.device_mesh import DeviceMesh",
        "import torch\ntorch.distributed.barrier()",
        "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup",
    ],
)
def test_every_way_to_torch_distributed_is_seen(code: str) -> None:
    assert imports(ast.parse(code), "torch.distributed")


@pytest.mark.parametrize("code", ["import torch", "from torch import nn", "from dshard.comm import DeviceMesh"])
def test_other_imports_are_not_mistaken_for_it(code: str) -> None:
    assert not imports(ast.parse(code), "torch.distributed")


# -- circles, however an import is written


def module_of(path: Path) -> str:
    return ".".join(("dshard", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}
CONTRACT = (PACKAGE.parent / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
LAYERS = re.findall(r'"([\w |:]+)"', CONTRACT)
HEIGHT = {room: -i for i, rooms in enumerate(LAYERS) for room in re.findall(r"\w+", rooms)}
"""The height of each layer of the import contract."""


def needed(tree: ast.AST) -> set[str]:
    """The modules of dshard that the code imports: at its top, late, for types alone, or by a name in a string."""
    names = {*imported(tree)}
    for node in nodes(tree):
        match node:
            case ast.Constant(value=str(text)) if text in MODULES:
                names.add(text)
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function), args=[ast.Constant(value=str(text))]
            ):
                names |= {text} if re.search("import|late", function) else set()
    found = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return (found & MODULES.keys()) - {"dshard"}


def test_no_circle_of_imports_and_none_upwards() -> None:
    """However they are written; dshard's own `__init__`, above all, hands up what lower files call of higher ones."""
    graph = {name: needed(parsed(path)) - {name} for name, path in MODULES.items() if name != "dshard"}

    assert [*TopologicalSorter(graph).static_order()]  # raises of a circle, with its files
    upwards = {
        f"{name} -> {other}"
        for name, others in graph.items()
        for other in others
        if HEIGHT[name.split(".")[1]] < HEIGHT[other.split(".")[1]]
    }
    assert upwards == set()


@pytest.mark.parametrize(
    "code",
    [
        "from dshard import tensor",
        "from dshard.tensor import DTensor",
        "def f():\n    import dshard.tensor",
        "if TYPE_CHECKING:\n    from dshard.tensor import DTensor",
        "import_module('dshard.tensor')",
        "LATE = {'DTensor': 'dshard.tensor'}",
        "late('dshard.tensor.DTensor')",
    ],
)
def test_every_way_to_a_file_of_dshard_is_seen(code: str) -> None:
    assert needed(ast.parse(code)) == {"dshard.tensor"}


def test_a_late_import_is_seen() -> None:
    assert late_importers(ast.parse("def f():\n    if x:\n        import rich")) == {"f"}


# -- what is loaded


LATE = """
import gc
assert gc.isenabled()
assert set(dshard.__all__) | {'calibrate', 'parallel', 'visualize'} <= set(dir(dshard))
assert dshard.parallel.parallelize is dshard.parallelize
from dshard import plan_model
assert plan_model is dshard.parallel.plan_model
"""


@cache
def loaded() -> tuple[set[str], set[str]]:
    """The modules that `import dshard` loads in a new process with torch, and those that `LATE` loads after it."""
    script = "import sys, torch\n"
    for code in ("import dshard", LATE):
        script += f"before = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    first, then = done.stdout.splitlines()
    return {*first.split()}, {*then.split()}


@pytest.mark.thorough
def test_importing_dshard_loads_little_beside_its_own_modules() -> None:
    found, _ = loaded()

    own = {name for name in found if name.split(".")[0] == "dshard"}
    assert found - own <= MAY_LOAD
    assert not {name.split(".")[1] for name in own - {"dshard"}} & LATE_LAYERS


def test_what_is_imported_late_is_there_when_it_is_asked_for() -> None:
    _, found = loaded()

    assert "dshard.parallel" in found
    for name in dshard.__all__:
        assert getattr(dshard, name) is not None
    with pytest.raises(AttributeError, match="module 'dshard' has no attribute 'paralell'"):
        dshard.paralell  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_programs_import_what_there_is(folder: str) -> None:
    """Most of these are run by hand, and some for hours before they would tell."""
    missing = []
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in nodes(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dshard":
                home = import_module(str(node.module))
                names = [each.name for each in node.names if not hasattr(home, each.name)]
                missing += [f"{path.name}: {node.module}.{name}" for name in names]
    assert missing == []


def test_no_two_files_share_a_name() -> None:
    names = Counter(path.name for path in SOURCES if path.name not in ("__init__.py", "__main__.py"))
    assert {name for name, n in names.items() if n > 1} == set()


def test_no_two_public_classes_share_a_name() -> None:
    defined = [node for path in SOURCES for node in nodes(parsed(path)) if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in defined if not node.name.startswith("_"))

    assert {name for name, n in names.items() if n > 1} == set()


@pytest.mark.parametrize("package", ["rules", "comm", "core", "autograd", "ops", "compile", "dispatch"])
def test_a_package_names_its_files(package: str) -> None:
    """docs/design/0012-the-path-of-a-call.md sends its readers to these lists."""
    listed = {*re.findall(r"\w+", ast.get_docstring(parsed(PACKAGE / package / "__init__.py")) or "")}
    assert {path.stem for path in (PACKAGE / package).glob("*.py")} - {"__init__"} <= listed


def test_no_function_is_handed_the_class_of_distributed_tensors() -> None:
    """What lies below DTensor is typed by `dshard.core.wrapper.Wrapper`."""
    assert [str(path) for path in SOURCES if "cls: Any" in path.read_text()] == []


def test_every_cache_is_in_cache_info() -> None:
    """Functions are cached by `dshard.caches.cached`, under a name and with a bound, never by functools alone."""
    by_python = {"functools", "functools.cache", "functools.lru_cache"}

    assert [path for path in SOURCES if by_python & {*imported(parsed(path))}] == [PACKAGE / "caches.py"]
