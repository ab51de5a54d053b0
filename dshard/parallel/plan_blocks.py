"""Blocks of a model that are laid out alike, told by the names of modules: "blocks.0-11.attn (x12)"."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple


class BlockName(NamedTuple):
    """Where a module is: in the entry `number` of the outermost list of modules at `path`, there called `rest`."""

    path: str
    number: int
    rest: str


def block_of(module: str) -> BlockName | None:
    """The block in which a module of this name is, if it is in one.

    >>> block_of("model.layers.3.mlp.up")
    BlockName(path='model.layers', number=3, rest='mlp.up')
    """
    names = module.split(".")
    at = next((i for i, name in enumerate(names) if name.isdecimal()), None)
    return None if at is None else BlockName(".".join(names[:at]), int(names[at]), ".".join(names[at + 1 :]))


def folded(keys: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Modules by a common name: those of consecutive blocks that have the same modules with the same keys are one.

    >>> folded({"embedding": "a", "blocks.0.up": "b", "blocks.1.up": "b", "blocks.2.up": "c"})
    {'embedding': ['embedding'], 'blocks.0-1.up (x2)': ['blocks.0.up', 'blocks.1.up'], 'blocks.2.up': ['blocks.2.up']}
    """
    blocks: dict[tuple[str, int], dict[str, Hashable]] = {}
    for module, key in keys.items():
        if block := block_of(module):
            blocks.setdefault(block[:2], {})[block.rest] = key
    runs: dict[tuple[str, int], list[int]] = {}
    for path, number in blocks:
        before = runs.get((path, number - 1))
        alike = before is not None and blocks[path, number] == blocks[path, number - 1]
        runs[path, number] = run = before if before is not None and alike else []
        run.append(number)
    groups: dict[str, list[str]] = {}
    for module in keys:
        block, label = block_of(module), module
        if block and len(run := runs[block[:2]]) > 1:
            label = ".".join(filter(None, [block.path, f"{run[0]}-{run[-1]}", block.rest])) + f" (x{len(run)})"
        groups.setdefault(label, []).append(module)
    return groups
