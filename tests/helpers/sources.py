"""The sources of the package, each parsed and walked once for all tests of a process that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import dshard

PACKAGE = Path(dshard.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


_NODES: dict[ast.AST, list[ast.AST]] = {}


def nodes(tree: ast.AST) -> list[ast.AST]:
    """What `ast.walk` gives of a tree, which is kept for the next test."""
    if tree not in _NODES:
        _NODES[tree] = [*ast.walk(tree)]
    return _NODES[tree]
