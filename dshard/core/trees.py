"""Leaves of nested tuples, lists and dicts, the arguments and results of calls; tensors in containers of any class.

What a module is given and returns may be of any class of sequence, mapping or dataclass, which `map_tensors` keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from operator import is_
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


def map_tensors(tree: Any, change: Callable[[Tensor], object]) -> Any:
    """`tree` with `change` applied to each tensor, in order; each container keeps its class."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)([change(x) if isinstance(x, Tensor) else map_tensors(x, change) for x in tree])
    if type(tree) is dict:
        return {name: map_tensors(item, change) for name, item in tree.items()}
    if not nested_tensors(tree):
        return tree
    items = {name: map_tensors(item, change) for name, item in _items(tree)}
    if isinstance(tree, tuple | list):
        return tree._make(items.values()) if hasattr(tree, "_make") else type(tree)(items.values())
    changed = copy(tree)
    for name, item in items.items():
        if isinstance(tree, MutableMapping):
            changed[name] = item
        else:
            object.__setattr__(changed, name, item)  # of a frozen dataclass, too
    return changed


def map_given(tree: Any, change: Callable[[Tensor], object]) -> Any:
    """`map_tensors` of what a call is given: its caller sees what the call adds to lists and dicts without tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) not in (tuple, list, dict):
        return map_tensors(tree, change)
    items = tree.values() if isinstance(tree, dict) else tree
    changed = [map_given(item, change) for item in items]
    if all(map(is_, changed, items)):
        return tree
    return dict(zip(tree, changed, strict=True)) if isinstance(tree, dict) else type(tree)(changed)


def named_tensors(tree: object, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Tensor]]:
    """The tensors that `map_tensors` changes, in its order, each with the numbers and names that lead to it."""
    if isinstance(tree, Tensor):
        return [(path, tree)]
    return [named for name, item in _items(tree) for named in named_tensors(item, (*path, str(name)))]


def nested_tensors(tree: Any) -> list[Tensor]:
    """The tensors that `map_tensors` changes, in its order."""
    if isinstance(tree, Tensor):
        return [tree]
    tensors: list[Tensor] = []
    if type(tree) is dict:
        tree = tree.values()
    elif type(tree) not in (tuple, list):
        tree = [item for _, item in _items(tree)]
    for item in tree:
        if isinstance(item, Tensor):
            tensors.append(item)
        else:
            tensors += nested_tensors(item)
    return tensors


def _items(tree: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a container by name or number; none of any other object."""
    if isinstance(tree, tuple | list):
        return enumerate(tree)
    if isinstance(tree, MutableMapping):
        return tree.items()
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree) if hasattr(tree, field.name)]
    return ()
