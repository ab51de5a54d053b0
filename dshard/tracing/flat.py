"""What torch.compile is told of a distributed tensor, beside its local part: all that a compiled graph depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dshard.comm import runtime_of
from dshard.layout import Layout
from dshard.ops.matmul.asked import Asked, asked_now
from dshard.ops.settings import Settings, current, settings_of
from dshard.ops.spec import Spec
from dshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A distributed tensor without its local part and sizes, and the settings under which choices are made for it.

    Made by `flat`: the same object each time. Two are equal if they describe the same tensor, for what was computed
    under some settings is the same tensor under others. But a graph compiled under other settings may have chosen
    otherwise, so it is not used again: see `serves`.
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    leaf: bool
    settings: Settings
    asked: Asked

    def serves(self, now: Flat) -> bool:
        """Whether a graph compiled for this one does what would be chosen for the other now."""
        return self is now or (
            self == now and self.leaf == now.leaf and self.settings is now.settings and self.asked == now.asked
        )

    def digest(self) -> str:
        """A name that two processes have in common only where the graph of one may run in the other."""
        mesh = self.layout.mesh
        runtime = runtime_of(mesh)
        parts = self.layout, self.dtype, self.device, self.leaf, self.asked, self.settings.topology_of(mesh)
        place = None if runtime is None else (runtime.rank, runtime.coordinate)
        return hashlib.blake2b(repr((parts, place)).encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flat):
            return False
        return (self.layout, self.dtype, self.device) == (other.layout, other.dtype, other.device)

    def __hash__(self) -> int:
        return hash((self.layout, self.dtype, self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Flat:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.layout, self.dtype, self.device, self.leaf, self.settings.topology, self.asked)


class _Now:
    settings, asked = current(), asked_now()
    flats: ClassVar[dict[tuple[object, ...], Flat]] = {}


_ALL: dict[tuple[Settings, Asked], dict[tuple[object, ...], Flat]] = {(_Now.settings, _Now.asked): _Now.flats}


def flat(spec: Spec, leaf: bool) -> Flat:
    """What describes the tensor of this spec here and now; `leaf` of autograd or not."""
    settings, asked = current(), asked_now()
    if _Now.settings is not settings or _Now.asked is not asked:
        _Now.settings, _Now.asked, _Now.flats = settings, asked, _ALL.setdefault((settings, asked), {})
    return _flat(spec.layout, spec.dtype, spec.device, leaf, settings, asked, _Now.flats)


def _flat(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    leaf: bool,
    settings: Settings,
    asked: Asked,
    flats: dict[tuple[object, ...], Flat],
) -> Flat:
    key = layout, dtype, device, leaf
    found = flats.get(key)
    if found is None:
        found = flats[key] = Flat(layout, dtype, device, leaf, settings, asked)
    return found


def _restored(
    layout: Layout, dtype: torch.dtype, device: torch.device, leaf: bool, topology: Topology | None, asked: Asked
) -> Flat:
    settings = settings_of(topology)
    return _flat(layout, dtype, device, leaf, settings, asked, _ALL.setdefault((settings, asked), {}))


def numbers(sizes: Iterable[int]) -> tuple[int, ...]:
    """Sizes as they are now: a graph in which they stand for others, too, is told to serve these only.

    Plans are for one size: another is another graph, compiled when it comes.
    """
    return tuple(map(int, sizes))
