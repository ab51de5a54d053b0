"""Where local tensors live is asked in few places: callers say what is to be done with them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from helpers.sources import PACKAGE, SOURCES, nodes, parsed

PLACES = {"LocalTensor", "is_meta", "is_outside"}
"""Names by which one asks whether ranks are simulated, and whether a tensor has no data, or this rank is outside."""
MODES = {"simulated_ranks", "traced", "is_any_traced"}
"""Names by which one asks whether this process simulates ranks, and whether torch traces."""
MOST_PLACES, MOST_MODES = 16, 44


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def asks(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """The lines on which one of these is called, read of a tensor, handed to a call, or compared with a type."""
    for node in nodes(tree):
        match node:
            case ast.Call() if name_of(node.func) in names or any(name_of(arg) in names for arg in node.args):
                yield node.lineno
            case ast.Compare() if any(name_of(each) in names for each in nodes(node)):
                yield node.lineno
            case ast.Attribute(attr="is_meta") if "is_meta" in names:
                yield node.lineno


def count(names: set[str]) -> Counter[str]:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in SOURCES}
    del files["parallel/roles.py"]  # whose `traced` is a model
    return Counter({name: len(set(asks(parsed(path), names))) for name, path in files.items()})


def test_only_the_files_of_worlds_ask_where_local_tensors_live() -> None:
    asked = count(PLACES)

    assert asked.total() <= MOST_PLACES, +asked
    assert asked["comm/rank_tensors.py"] + asked["comm/world.py"] > asked.total() / 2


def test_few_places_ask_who_computes() -> None:
    asked = count(MODES)

    assert asked.total() <= MOST_MODES, +asked
