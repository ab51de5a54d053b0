"""Flat names of a nested state, as in torch.distributed.checkpoint: "optimizer.state.0.exp_avg"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from dshard.errors import CheckpointError
from dshard.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class StateLeaf:
    """A value of the state, by its container and key."""

    name: str
    container: Any
    key: Any

    @property
    def value(self) -> Any:
        """The current value in the container."""
        return self.container[self.key]


def leaves(state: Mapping[str, object]) -> dict[str, StateLeaf]:
    """The leaves of a state by name: of dicts, and of lists that hold tensors or dicts.

    >>> list(leaves({"model": {"w": 1}, "groups": [{"lr": 0.1, "params": [0, 1]}]}))
    ['model.w', 'groups.0.lr', 'groups.0.params']
    """
    by_name: dict[str, StateLeaf] = {}
    for leaf in _leaves("", state):
        if leaf.name in by_name:
            raise CheckpointError(f"two values of the state are called {leaf.name!r}: rename one of them")
        by_name[leaf.name] = leaf
    return by_name


def _leaves(prefix: str, container: Any) -> Iterator[StateLeaf]:
    pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in list(pairs):
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) or (isinstance(value, list) and any(map(_is_inner, value))):
            yield from _leaves(f"{name}.", value)
            continue
        if isinstance(value, tuple | set) and any(isinstance(item, DTensor) for item in value):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} of distributed tensors: put them into a list or a dict"
            )
        if isinstance(value, Stateful):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} inside the state: put it at the top, or give its state_dict()"
            )
        yield StateLeaf(name, container, key)


def _is_inner(value: object) -> bool:
    return isinstance(value, Tensor | Mapping) or (isinstance(value, list) and any(map(_is_inner, value)))
