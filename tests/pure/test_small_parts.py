"""Classes and functions stay small enough to be read: few attributes, few parameters, a screen of lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.sources import SOURCES, nodes, parsed

MOST_ATTRIBUTES, MOST_PARAMETERS, MOST_LINES = 15, 8, 60


def attributes(cls: ast.ClassDef) -> set[str]:
    """The fields of a class, and what its methods set on `self`."""
    fields = {each.target for each in cls.body if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.dump(each)}
    names = {field.id for field in fields if isinstance(field, ast.Name)}
    for each in (each for method in cls.body if isinstance(method, ast.FunctionDef) for each in ast.walk(method)):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name):
            names |= {each.attr} if each.value.id == "self" else set()
    return names


def is_small(function: ast.FunctionDef) -> bool:
    """Whether a function has few parameters, or is a public one with more options by keyword."""
    arguments = function.args
    positional = [each for each in (*arguments.posonlyargs, *arguments.args) if each.arg not in ("self", "cls")]
    is_public = not function.name.startswith("_") or function.name == "__init__"
    options = 0 if is_public else len(arguments.kwonlyargs)
    return len(positional) + options <= MOST_PARAMETERS


def too_large(tree: ast.Module) -> Iterator[str]:
    for each in nodes(tree):
        if isinstance(each, ast.ClassDef) and len(attributes(each)) > MOST_ATTRIBUTES:
            yield f"class {each.name} has {len(attributes(each))} attributes"
        if isinstance(each, ast.FunctionDef) and not is_small(each):
            yield f"{each.name} has more than {MOST_PARAMETERS} parameters"
        if isinstance(each, ast.FunctionDef) and (each.end_lineno or 0) - each.lineno >= MOST_LINES:
            yield f"{each.name} has more than {MOST_LINES} lines"


def test_no_class_and_no_function_is_too_large() -> None:
    found = [f"{file.name}: {text}" for file in SOURCES for text in too_large(parsed(file))]

    assert not found


def test_what_is_too_large_is_found() -> None:
    fields = "\n".join(f"    f{i}: int" for i in range(MOST_ATTRIBUTES))
    methods = "    def set(self, x):\n        self.more, x.other = 1, 2"
    parameters = ", ".join(f"p{i}" for i in range(MOST_PARAMETERS + 1))
    lines = "def f():" + "\n    pass" * MOST_LINES
    programs = (f"class A:\n{fields}\n{methods}", f"def f({parameters}): ...", f"def _f(*, {parameters}): ...", lines)

    assert [len([*too_large(ast.parse(text))]) for text in programs] == [1, 1, 1, 1]
    fitting = f"class A:\n{fields}\ndef f(*, {parameters}): ...\n{lines.removesuffix('pass').rstrip()}"
    assert not [*too_large(ast.parse(fitting))]
