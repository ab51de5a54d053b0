"""Leaves of nested tuples, lists and dicts: the arguments and results of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def leaves(tree: object) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if not isinstance(tree, list | tuple | dict):
        return [tree]
    out: list[Any] = []
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, list | tuple | dict):
            out += leaves(item)
        else:
            out.append(item)
    return out


def replace_leaves(tree: object, change: Callable[[Any], object]) -> Any:
    """`tree`, nested tuples, lists and dicts, with `change` applied to each leaf, in order."""
    if isinstance(tree, list):
        return [replace_leaves(item, change) for item in tree]
    if isinstance(tree, tuple):
        return tuple(replace_leaves(item, change) for item in tree)
    if isinstance(tree, dict):
        return {name: replace_leaves(item, change) for name, item in tree.items()}
    return change(tree)


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors among the leaves of nested tuples, lists and dicts, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def replace_tensors(tree: object, change: Callable[[Tensor], object]) -> Any:
    """`tree`, nested tuples, lists and dicts, with `change` applied to each tensor, in order."""
    return replace_leaves(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)
