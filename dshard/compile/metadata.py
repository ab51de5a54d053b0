"""Metadata of a distributed tensor for torch.compile: all that a compiled graph depends on beside local tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dshard.caches import Cache
from dshard.comm import runtime_of
from dshard.core.context import PlanningContext, planning_context, planning_context_of
from dshard.core.spec import Spec, spec_of
from dshard.layout import Layout, Shape
from dshard.ops.matmul.options import MatmulOptions, current_options
from dshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class CompileMetadata:
    """A distributed tensor without its local tensor and sizes, and the settings under which choices are made for it.

    Made by `compile_metadata`: one object for one description. Two are equal if they describe the same tensor, whatever
    the settings, for values do not depend on these. But a graph compiled under other settings may have chosen
    otherwise, so it is not used again: see `serves`.
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    leaf: bool
    settings: PlanningContext
    asked: MatmulOptions
    specs: Cache = field(default_factory=lambda: Cache("compiled sizes", 64), repr=False)

    def spec(self, shape: Shape, stride: Shape) -> Spec:
        """The spec of a tensor with this metadata and these sizes."""
        spec: Spec | None = self.specs.get((shape, stride))
        if spec is None:
            spec = self.specs.add((shape, stride), spec_of(self.layout, shape, stride, self.dtype, self.device))
        return spec

    def serves(self, now: CompileMetadata) -> bool:
        """Whether a graph compiled for this metadata does what would be chosen for `now`."""
        return self is now or (
            self == now and self.leaf == now.leaf and self.settings is now.settings and self.asked == now.asked
        )

    def digest(self) -> str:
        """A hash that two processes share only where the graph of one may run in the other."""
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
        return _restored, (self.settings.topology, self.asked, self.layout, self.dtype, self.device, self.leaf)


_BY_DESCRIPTION = Cache("compiled metadata")
"""The one object of each description, by all its fields but `specs`."""


class _Last:
    """The settings of the last call of `compile_metadata`, with the metadata by spec: not of leaves, and of leaves."""

    caches: ClassVar[tuple[PlanningContext, MatmulOptions, tuple[Cache, Cache]] | None] = None


def compile_metadata(spec: Spec, leaf: bool) -> CompileMetadata:
    """The metadata of a tensor of `spec` under the settings in force; `leaf` says whether it is a leaf of autograd."""
    settings, asked, last = planning_context(), current_options(), _Last.caches
    if last is None or last[0] is not settings or last[1] is not asked:
        last = _Last.caches = settings, asked, (Cache("compiled specs", 4096), Cache("compiled specs", 4096))
    by_spec = last[2][leaf]
    metadata: CompileMetadata | None = by_spec.get(spec)
    if metadata is None:
        metadata = by_spec.add(spec, _metadata_of(spec.layout, spec.dtype, spec.device, leaf, settings, asked))
    return metadata


def _metadata_of(*description: Any) -> CompileMetadata:
    metadata: CompileMetadata | None = _BY_DESCRIPTION.get(description)
    return metadata or _BY_DESCRIPTION.add(description, CompileMetadata(*description))


def _restored(topology: Topology | None, asked: MatmulOptions, *description: Any) -> CompileMetadata:
    return _metadata_of(*description, planning_context_of(topology), asked)


def concrete_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Sizes as plain integers, to which a graph with symbolic sizes is thereby specialised.

    Plans are for one size: for another size another graph is compiled.
    """
    return tuple(map(int, sizes))
