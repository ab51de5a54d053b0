"""What torch.compile is told of a distributed tensor, beside its local part: all that a compiled graph depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch

from dshard.comm import runtime_of
from dshard.core.context import PlanningContext, planning_context, planning_context_of
from dshard.core.spec import Spec, spec_of
from dshard.layout import Layout, Shape
from dshard.ops.matmul.options import MatmulOptions, current_options
from dshard.topology import Topology

_SIZES, _SPECS = 64, 4096
"""Of so many sizes of tensors that are alike else the specs are at hand; and of so many specs what describes them."""


@dataclass(frozen=True, slots=True, eq=False)
class CompileMetadata:
    """A distributed tensor without its local part and sizes, and the settings under which choices are made for it.

    Made by `flat`: the same object each time. Two are equal if they describe the same tensor, for what was computed
    under some settings is the same tensor under others. But a graph compiled under other settings may have chosen
    otherwise, so it is not used again: see `serves`.
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    leaf: bool
    settings: PlanningContext
    asked: MatmulOptions
    specs: dict[tuple[Shape, Shape], Spec] = field(default_factory=dict, repr=False)

    def spec(self, shape: Shape, stride: Shape) -> Spec:
        """The spec of a tensor of these sizes that is described so."""
        found = self.specs.get((shape, stride))
        if found is None:
            if len(self.specs) >= _SIZES:
                self.specs.clear()
            found = self.specs[shape, stride] = spec_of(self.layout, shape, stride, self.dtype, self.device)
        return found

    def serves(self, now: CompileMetadata) -> bool:
        """Whether a graph compiled for this one does what would be chosen for the other now."""
        return self is now or (
            self == now and self.leaf == now.leaf and self.settings is now.settings and self.asked == now.asked
        )

    def digest(self) -> str:
        """A name that two processes have in common only where the graph of one may run in the other."""
        mesh = self.layout.mesh
        runtime = runtime_of(mesh)
        parts = self.layout, self.dtype, self.device, self.leaf, self.asked, self.settings.topology_of(mesh)
        place = None if runtime is None else (runtime.rank, runtime.coordinate, runtime.group_names())
        return hashlib.blake2b(repr((parts, place)).encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompileMetadata):
            return False
        return (self.layout, self.dtype, self.device) == (other.layout, other.dtype, other.device)

    def __hash__(self) -> int:
        return hash((self.layout, self.dtype, self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompileMetadata:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.layout, self.dtype, self.device, self.leaf, self.settings.topology, self.asked)


_Known: TypeAlias = tuple[
    PlanningContext,
    MatmulOptions,
    dict[tuple[object, ...], CompileMetadata],
    tuple[dict[Spec, CompileMetadata], dict[Spec, CompileMetadata]],
]
_ALL: dict[tuple[PlanningContext, MatmulOptions], dict[tuple[object, ...], CompileMetadata]] = {}


class _Last:
    """The settings that were asked for last, with what describes tensors under them.

    Last of all the specs of tensors that are no leaves, and of leaves.
    """

    known: ClassVar[_Known | None] = None


def _under(settings: PlanningContext, asked: MatmulOptions) -> _Known:
    last = _Last.known
    if last is None or last[0] is not settings or last[1] is not asked:
        last = _Last.known = settings, asked, _ALL.setdefault((settings, asked), {}), ({}, {})
    return last


def compile_metadata(spec: Spec, leaf: bool) -> CompileMetadata:
    """What describes the tensor of this spec here and now; `leaf` of autograd or not."""
    settings, asked, flats, specs = _under(planning_context(), current_options())
    known = specs[leaf]
    found = known.get(spec)
    if found is None:
        if len(known) >= _SPECS:
            known.clear()
        found = known[spec] = _flat(spec.layout, spec.dtype, spec.device, leaf, settings, asked, flats)
    return found


def _flat(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    leaf: bool,
    settings: PlanningContext,
    asked: MatmulOptions,
    flats: dict[tuple[object, ...], CompileMetadata],
) -> CompileMetadata:
    key = layout, dtype, device, leaf
    found = flats.get(key)
    if found is None:
        found = flats[key] = CompileMetadata(layout, dtype, device, leaf, settings, asked)
    return found


def _restored(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    leaf: bool,
    topology: Topology | None,
    asked: MatmulOptions,
) -> CompileMetadata:
    settings = planning_context_of(topology)
    return _flat(layout, dtype, device, leaf, settings, asked, _ALL.setdefault((settings, asked), {}))


def concrete_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Sizes as they are now: a graph in which they stand for others, too, is told to serve these only.

    Plans are for one size: another is another graph, compiled when it comes.
    """
    return tuple(map(int, sizes))
