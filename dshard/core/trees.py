"""Leaves of nested tuples, lists and dicts, the arguments and results of calls; tensors in containers of any class.

What a module is given and returns may be of any class of sequence, mapping or dataclass, which `map_tensors` keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

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
    return _with_items(tree, {name: map_tensors(item, change) for name, item in _items(tree)})


def _with_items(tree: Any, items: dict[Any, Any]) -> Any:
    """A container of the class of `tree` with these items, as `_items` names them."""
    if type(tree) is dict:
        return {**items}
    if isinstance(tree, tuple | list):
        return tree._make(items.values()) if hasattr(tree, "_make") else type(tree)(items.values())
    changed = copy(tree)
    _set_items(changed, items)
    return changed


def _set_items(tree: Any, items: dict[Any, Any]) -> None:
    for name, item in items.items():
        if isinstance(tree, MutableMapping):
            tree[name] = item
        else:
            object.__setattr__(tree, name, item)  # of a frozen dataclass, too


class GivenCopy(NamedTuple):
    """The copy that a call is given of its caller's container, with the items that both had by then."""

    own: Any
    copy: Any
    own_items: dict[Any, Any]
    items: dict[Any, Any]


def map_given(tree: Any, change: Callable[[Tensor], object], copies: list[GivenCopy]) -> Any:
    """`map_tensors` of what a call is given: containers without tensors that change are those of its caller.

    The copies of others are added to `copies`.
    """
    return _given(tree, change, copies)[0]


def _given(tree: Any, change: Callable[[Tensor], object], copies: list[GivenCopy]) -> tuple[Any, bool]:
    """`map_given`, and whether anything has changed: Dynamo cannot ask that of two tuples."""
    if isinstance(tree, Tensor):
        changed = change(tree)
        return changed, changed is not tree
    own = dict(_items(tree))
    given = {name: _given(item, change, copies) for name, item in own.items()}
    if not any(has_changed for _, has_changed in given.values()):
        return tree, False
    for each in copies:
        if each.own is tree:
            return each.copy, True
    items = {name: item for name, (item, _) in given.items()}
    copy = _with_items(tree, items)
    if not isinstance(tree, tuple):
        copies.append(GivenCopy(tree, copy, own, items))
    return copy, True


def give_back(copies: list[GivenCopy], change: Callable[[Tensor], object]) -> None:
    """Do to the containers of a caller what a call did to their `copies`, with `change` applied to new tensors."""
    own = dict[int, Any]()
    for each in copies:
        own |= {id(x): each.own_items[name] for name, x in each.items.items() if x is not each.own_items[name]}

    def of_caller(x: Any) -> Any:
        if id(x) in own:
            return own[id(x)]
        return change(x) if isinstance(x, Tensor) else map_tensors(x, of_caller)

    for each in reversed(copies):  # some are copies of copies
        items = dict(_items(each.copy))
        new = {name: of_caller(x) for name, x in items.items() if x is not each.items.get(name, items)}
        if isinstance(each.own, list):
            if new or len(items) != len(each.items):
                each.own[:] = [new.get(name, each.own_items.get(name)) for name in items]
            continue
        if isinstance(each.own, MutableMapping):
            for name in each.items.keys() - items.keys():
                del each.own[name]
        _set_items(each.own, new)


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
