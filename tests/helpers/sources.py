"""The sources of the package, each parsed once for all tests of a process that read them."""

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
