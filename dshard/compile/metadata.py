"""Metadata of a distributed tensor for torch.compile: everything a graph depends on except local tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import runtime_of
from dshard.core.context import PlanningContext, planning_context, planning_context_of
from dshard.core.spec import Spec, spec_of
from dshard.layout import Layout
from dshard.ops.matmul.options import MatmulOptions, current_options
from dshard.topology import Topology
from dshard.validate import is_symbolic

_SPECS = 4096
"""How many specs have their metadata kept."""


class CompileMetadata(tuple[Any, ...]):
    """A distributed tensor's spec without its local tensor, and the settings that affect its strategies.

    It is the tuple that torch asks of its own class, and compares with the spec of the tensor. Two are equal if they
    describe the same tensor of any size, whatever the settings, for values do not depend on these. Made by
    `compile_metadata`: one object for one spec and settings.
    """

    origin: Spec
    leaf: bool
    settings: PlanningContext
    options: MatmulOptions

    def spec(self, shape: Sequence[int], stride: Sequence[int]) -> Spec:
        """Return the spec of a tensor with this metadata and these sizes."""
        spec = self.origin
        if spec.shape == shape and spec.stride == stride:
            return spec
        return spec_of(spec.layout, tuple(shape), tuple(stride), spec.dtype, spec.device)

    def digest(self) -> str:
        """Return a hash that two processes share only if the graph of one may run in the other."""
        spec, mesh = self.origin, self.origin.layout.mesh
        runtime = runtime_of(mesh)
        tensor = spec.layout, spec.shape, spec.stride, spec.dtype, spec.device, self.leaf, bool(self[-1])
        parts = *tensor, self.options, astuple(self.settings.topology_of(mesh)), library_digest()
        place = None if runtime is None else (runtime.rank, runtime.coordinate, runtime.group_names())
        return hashlib.blake2b(repr((parts, place)).encode(), digest_size=16).hexdigest()

    def _described(self) -> tuple[Layout, torch.dtype, torch.device]:
        return self.origin.layout, self.origin.dtype, self.origin.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompileMetadata) and self._described() == other._described()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._described())

    def __deepcopy__(self, memo: dict[int, object]) -> CompileMetadata:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.origin, self.leaf, bool(self[-1]), self.settings.topology, self.options)


@cached("compile metadata", 1)
def library_digest() -> str:
    """Return a hash of this library's code, which decides what a graph sends."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=16).hexdigest()


def compile_metadata(spec: Spec, leaf: bool, requires_grad: bool) -> CompileMetadata:
    """Return the metadata of a tensor of `spec` under the current settings; `leaf` marks an autograd leaf."""
    return _metadata_of(spec, leaf, requires_grad, planning_context(), current_options())


@cached("compile metadata", _SPECS)
def _metadata_of(
    spec: Spec, leaf: bool, requires_grad: bool, settings: PlanningContext, options: MatmulOptions
) -> CompileMetadata:
    metadata = CompileMetadata((spec.placements, spec.tensor_meta, spec.shard_order, requires_grad))
    metadata.origin, metadata.leaf, metadata.settings, metadata.options = spec, leaf, settings, options
    return metadata


def _restored(
    spec: Spec, leaf: bool, requires_grad: bool, topology: Topology | None, options: MatmulOptions
) -> CompileMetadata:
    return _metadata_of(spec, leaf, requires_grad, planning_context_of(topology), options)


def concrete_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return `sizes` as plain integers, which specialises a graph with symbolic sizes to them.

    Plans are for one size: for another size another graph is compiled.
    """
    return tuple(map(int, sizes))


def with_concrete_sizes(x: Tensor) -> Tensor:
    """Return `x` with its symbolic sizes specialised, as shard boundaries depend on them."""
    return x.view(concrete_sizes(x.shape)) if any(map(is_symbolic, x.shape)) else x
