"""Leaves of nested tuples, lists and dicts: the arguments and results of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

_TREES = (list, tuple, dict)


def leaves(tree: object) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if not isinstance(tree, _TREES):
        return [tree]
    out: list[Any] = []
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, _TREES):
            out += leaves(item)
        else:
            out.append(item)
    return out


def replace_leaves(tree: object, change: Callable[[Any], object]) -> Any:
    """`tree`, nested tuples, lists and dicts, with `change` applied to each leaf, in order."""
    if not isinstance(tree, _TREES):
        return change(tree)
    items = tree.values() if isinstance(tree, dict) else tree
    changed = [replace_leaves(item, change) if isinstance(item, _TREES) else change(item) for item in items]
    if isinstance(tree, dict):
        return dict(zip(tree, changed, strict=True))
    return changed if isinstance(tree, list) else tuple(changed)


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors among the leaves of nested tuples, lists and dicts, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def replace_tensors(tree: object, change: Callable[[Tensor], object]) -> Any:
    """`tree`, nested tuples, lists and dicts, with `change` applied to each tensor, in order."""
    return replace_leaves(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def with_tensors(tree: object, tensors: Iterable[object]) -> Any:
    """`tree`, nested tuples, lists and dicts, with these in place of its tensors, in order."""
    rest = iter(tensors)
    return replace_leaves(tree, lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf)
