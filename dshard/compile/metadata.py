"""Metadata of a distributed tensor for torch.compile: all that a compiled graph depends on beside local tensors."""

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
"""Bounds of two caches: specs by size in one metadata, and metadata by spec."""


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
    specs: dict[tuple[Shape, Shape], Spec] = field(default_factory=dict, repr=False)

    def spec(self, shape: Shape, stride: Shape) -> Spec:
        """The spec of a tensor with this metadata and these sizes."""
        cached_spec = self.specs.get((shape, stride))
        if cached_spec is None:
            if len(self.specs) >= _SIZES:
                self.specs.clear()
            cached_spec = self.specs[shape, stride] = spec_of(self.layout, shape, stride, self.dtype, self.device)
        return cached_spec

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
        return _restored, (self.layout, self.dtype, self.device, self.leaf, self.settings.topology, self.asked)


_MetadataCaches: TypeAlias = tuple[
    PlanningContext,
    MatmulOptions,
    dict[tuple[object, ...], CompileMetadata],
    tuple[dict[Spec, CompileMetadata], dict[Spec, CompileMetadata]],
]
_ALL: dict[tuple[PlanningContext, MatmulOptions], dict[tuple[object, ...], CompileMetadata]] = {}


class _Last:
    """The settings of the last call of `compile_metadata`, with the metadata of tensors under them.

    The last two dicts have the metadata by spec, of tensors that are no leaves, and of leaves.
    """

    known: ClassVar[_MetadataCaches | None] = None


def _caches_under(settings: PlanningContext, asked: MatmulOptions) -> _MetadataCaches:
    current = _Last.known
    if current is None or current[0] is not settings or current[1] is not asked:
        current = _Last.known = settings, asked, _ALL.setdefault((settings, asked), {}), ({}, {})
    return current


def compile_metadata(spec: Spec, leaf: bool) -> CompileMetadata:
    """The metadata of a tensor of `spec` under the settings in force; `leaf` says whether it is a leaf of autograd."""
    settings, asked, by_description, specs = _caches_under(planning_context(), current_options())
    by_spec = specs[leaf]
    metadata = by_spec.get(spec)
    if metadata is None:
        if len(by_spec) >= _SPECS:
            by_spec.clear()
        metadata = by_spec[spec] = _metadata_of(
            spec.layout, spec.dtype, spec.device, leaf, settings, asked, by_description
        )
    return metadata


def _metadata_of(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    leaf: bool,
    settings: PlanningContext,
    asked: MatmulOptions,
    by_description: dict[tuple[object, ...], CompileMetadata],
) -> CompileMetadata:
    key = layout, dtype, device, leaf
    metadata = by_description.get(key)
    if metadata is None:
        metadata = by_description[key] = CompileMetadata(layout, dtype, device, leaf, settings, asked)
    return metadata


def _restored(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    leaf: bool,
    topology: Topology | None,
    asked: MatmulOptions,
) -> CompileMetadata:
    settings = planning_context_of(topology)
    return _metadata_of(layout, dtype, device, leaf, settings, asked, _ALL.setdefault((settings, asked), {}))


def concrete_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Sizes as plain integers, to which a graph with symbolic sizes is thereby specialised.

    Plans are for one size: for another size another graph is compiled.
    """
    return tuple(map(int, sizes))
