"""Sharded weights that are gathered for one module at a time, as in FSDP: prefetched, and freed after use.

In the forward pass a module works on weights that one collective has gathered. Autograd saves none of them, but their
positions: the backward pass gathers all again when it first unpacks one. Their gradients are reduced to the layouts of
the stored weights by one collective. Weights may be used in another dtype than the stored one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.autograd.leaf_gradients import accumulating, give_up_local
from dshard.comm import Stream, current_stream, follow
from dshard.core.moves import (
    Ends,
    LocalRedistribution,
    begin_together,
    joined_redistribution,
    redistribute_local,
    write_local,
)
from dshard.core.signature import Context
from dshard.core.spec import Spec
from dshard.core.view_sync import propagate_write, shown_of
from dshard.core.wrapper import Wrapper, wrap, wrap_in_flight
from dshard.errors import LayoutError
from dshard.layout import Layout
from dshard.placements import Replicate, Shard
from dshard.torch_private import autograd_engine, no_torch_function, saved_tensor_hooks


def gathered_layout(layout: Layout, axes: Sequence[str]) -> Layout:
    """`layout` with the dims that these mesh axes shard gathered."""
    for axis, name in enumerate(layout.mesh.names):
        if name in axes and isinstance(layout.placements[axis], Shard):
            layout = layout.replace(axis, Replicate())
    return layout


class GatheredWeights:
    """The gathered local tensors of some stored weights, perhaps in flight; `versions` are those of the weights.

    The first use of one waits for all, on the stream that is current then; a use on another stream follows that.
    """

    __slots__ = ("__weakref__", "_ends", "_local", "_places", "_stream", "versions")

    def __init__(self, stored: Sequence[Wrapper], moves: Sequence[LocalRedistribution]) -> None:
        self.versions = versions_of(stored)
        local, parameters = [x._local_tensor for x in stored], tuple(map(id, stored))
        self._ends: Ends | None = begin_together(moves, local, "gather weights", parameters)
        self._local: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._stream: Stream | None = None

    def local(self) -> list[Tensor]:
        """The local tensors."""
        if self._ends is not None:
            self._local, self._ends = [end() for end in self._ends], None
            self._places = {_storage(x): i for i, x in enumerate(self._local) if x.numel()}
            self._stream = current_stream(self._local[0].device) if self._local else None
        elif self._stream is not None:
            follow(self._stream, self._local)
        return self._local

    def place(self, x: Tensor) -> int | None:
        """The index of the local tensor whose memory `x` shares, or None."""
        return self._places.get(_storage(x))


def versions_of(stored: Sequence[Wrapper]) -> list[tuple[int, int, int, int]]:
    """The versions of weights, which change when a weight is written to or replaced, the last by a write to `data`."""
    locals = [x._local_tensor for x in stored]
    writes = [getattr(getattr(local, "_view_syncs", None), "writes", 0) for local in locals]
    with no_torch_function():  # which would take longer than all else here
        return list(zip(map(id, locals), _counts_of(locals), _counts_of(stored), writes, strict=True))


def _version(x: Wrapper) -> tuple[int, int, int, int]:
    return versions_of((x,))[0]


def _counts_of(xs: Sequence[Tensor]) -> list[int]:
    """`_count_of` each of some tensors."""
    try:
        return [x._version for x in xs]
    except RuntimeError:
        return [_count_of(x) for x in xs]


def _count_of(x: Tensor) -> int:
    """The number of writes that autograd counts; 0 for a tensor of inference mode, whose writes nobody counts."""
    try:
        return x._version
    except RuntimeError:
        return 0


class StoredPart:
    """The stored weight `x`, number `i` of `weights`, to which each write to its gathered copy is written, too.

    It stands among the origins of views of the copy's memory, where a call gives the origin.
    """

    __slots__ = ("copy", "i", "spec", "version", "versions", "x")

    def __init__(self, x: Wrapper, copy: Wrapper, i: int, weights: GatheredWeights) -> None:
        self.x, self.i, self.versions = x, i, weights.versions
        self.attach(copy)

    def __call__(self) -> StoredPart:
        return self

    def attach(self, copy: Wrapper) -> None:
        """Take `copy` as the gathered weight; its memory, not the tensor, which holds this part."""
        self.copy, self.spec = copy._local_tensor.detach(), copy._spec
        shown_of(copy._local_tensor).append(self)
        self.version = _count_of(self.copy)

    def refresh(self, op: object) -> None:
        """Write this rank's part of the copy, which `op` wrote, to the stored weight.

        Where the copy has another dtype, what the write left as it was keeps the precision in which it is stored. A
        write to `data`, which has a version counter of its own, is one to the stored weight's.
        """
        if self.versions[self.i] != _version(self.x):
            raise LayoutError(
                f"a weight of shape {self.x._spec.shape} was written to by a reference from outside, while a module "
                "has a gathered copy of it: write to it by the attribute of the module, or outside of a forward pass"
            )
        stored = self.x._local_tensor
        if _count_of(self.copy) == self.version:
            shown_of(stored).writes += 1
            stored = stored.data
        with torch.no_grad():
            part = redistribute_local(self.copy, self.spec, self.x._spec.layout, op)
            if part.dtype != stored.dtype:
                part = torch.where(part == stored.to(part.dtype), stored, part.to(stored.dtype))
            write_local(stored, part)
        propagate_write(self.x, op)
        self.version, self.versions[self.i] = _count_of(self.copy), _version(self.x)

    def write_back(self) -> None:
        """Write what was written to the local tensor, of which no operator on the copy told."""
        if _count_of(self.copy) != self.version or self.versions[self.i] != _version(self.x):
            self.refresh("write")

    def assign(self, value: Wrapper) -> None:
        """Assign to `data` of the stored weight what was assigned to that of the copy, now `value`."""
        spec: Spec = self.x._spec
        dtype = value._spec.dtype if self.spec.dtype == spec.dtype else spec.dtype
        part = redistribute_local(value._local_tensor, value._spec, spec.layout, "data")
        self.x.data = wrap(part.to(dtype, copy=True), value._spec.with_layout(spec.layout).with_dtype(dtype))
        self.versions[self.i] = _version(self.x)
        self.attach(value)


def stored_part(x: Wrapper) -> StoredPart | None:
    """The stored weight of which `x` is the gathered copy, or None."""
    origins = getattr(x._local_tensor, "_view_syncs", ())
    return next((each for each in origins if isinstance(each, StoredPart)), None)


def _storage(x: Tensor) -> int:
    local = x._local_tensor if isinstance(x, Wrapper) else x
    return int(local.untyped_storage()._cdata)


class SavedWeight(NamedTuple):
    """A gathered weight, or a view of one, as autograd saves it: its index, and its place in that memory.

    `spec` is that of a distributed tensor, None for a local one; `version` that of the stored weight, which a write to
    `data` does not change, None within other hooks: a checkpoint writes again.
    """

    use: GatheredUse
    i: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    spec: Spec | None
    version: tuple[int, ...] | None


class Outer(NamedTuple):
    """Another saved tensor, after the hooks that the user has put around a module."""

    packed: object


class Kept(NamedTuple):
    """Another saved tensor, and how often it had been written to: with hooks autograd itself does not check."""

    x: Tensor
    version: int


class GatheredUse:
    """One run of a module on gathered weights, which its backward pass gathers again.

    `begin` begins to gather them, or returns them if that has begun. `before` is the previous use, whose backward pass
    comes after this one's; `has_begun_before` says whether gathering its weights has begun, `saves_weights` whether
    the backward pass needs any. `reductions` are the reductions of gradients that have begun.
    """

    def __init__(
        self,
        stored: Sequence[Wrapper],
        moves: Sequence[LocalRedistribution],
        begin: Callable[[], GatheredWeights],
        before: GatheredUse | None,
    ) -> None:
        self.stored, self.moves, self.begin, self.before = stored, moves, begin, before
        self.gathered: GatheredWeights | None = begin()
        self.after: ReferenceType[GatheredUse] | None = None
        self.reductions: Ends = []
        self.parts: dict[int, StoredPart] = {}
        self.has_begun_before = self.saves_weights = False
        if before is not None:
            before.after = ref(self)
        self.outer: Any = saved_tensor_hooks(True)  # the user's, which see what is not ours

    def tensors(self) -> list[Wrapper]:
        """The gathered weights as distributed tensors, recorded by autograd."""
        assert self.gathered is not None
        local = self.gathered.local()
        with no_torch_function():
            needs = [i for i, x in enumerate(self.stored) if x.requires_grad] if torch.is_grad_enabled() else []
        recorded = GatherTogether.apply(self, needs, *[self.stored[i] for i in needs]) if needs else ()  # type: ignore[no-untyped-call]
        known = dict(zip(needs, recorded, strict=True))
        every = enumerate(zip(local, self.moves, strict=True))
        out: list[Wrapper] = [known[i] if i in known else wrap(x, move.spec) for i, (x, move) in every]
        pairs = enumerate(zip(self.stored, out, strict=True))
        self.parts = {i: StoredPart(x, w, i, self.gathered) for i, (x, w) in pairs if _storage(x) != _storage(w)}
        return out

    def write_back(self) -> None:
        """Write what was written to the local tensors alone to the stored weights; after the forward pass."""
        parts = [*self.parts.values()]
        counts, versions = _counts_of([part.copy for part in parts]), versions_of([part.x for part in parts])
        if counts != [part.version for part in parts] or versions != [part.versions[part.i] for part in parts]:
            for part in parts:
                part.write_back()
        self.parts = {}  # which hold the memory of the gathered weights

    def free(self) -> None:
        """Drop the gathered weights: the backward pass gathers them again."""
        self.gathered = None

    def reduce(
        self, grads: Sequence[Wrapper], stored: Sequence[Wrapper], moves: Sequence[LocalRedistribution]
    ) -> Iterator[Wrapper]:
        """Begin to reduce gradients of gathered weights to the layouts of the stored ones.

        The weights that the backward pass needs next are unpacked first, as the buffers of a reduction take as much
        memory as the gradients.
        """
        if self.before is not None and self.before.gathered is not None:
            self.before.gathered.local()
        specs = [_reduced(grad._spec, x) for grad, x in zip(grads, stored, strict=True)]
        reductions = [joined_redistribution(spec, move.source_grad) for spec, move in zip(specs, moves, strict=True)]
        local, leaves = give_up_local(grads), tuple(map(id, stored))
        ends = begin_together(reductions, local, f"gradients of {len(leaves)} leaves", leaves)
        self.finish_reductions_after()
        self.reductions = ends
        if any(reduction.has_steps for reduction in reductions):
            autograd_engine.queue_callback(self.finish_reductions)
        for end, reduction, x in zip(ends, reductions, stored, strict=True):
            dtype = x._spec.dtype
            cast_end = end if reduction.spec.dtype is dtype else partial(_cast_end, end, dtype)
            yield wrap_in_flight(cast_end, reduction.spec.with_dtype(dtype))

    def finish_reductions(self) -> None:
        """Wait for the reductions of gradients that have begun."""
        for end in self.reductions:
            end()
        self.reductions = []

    def finish_reductions_after(self) -> None:
        """Wait for the gradients of the use after this one, to free their buffers."""
        after = None if self.after is None else self.after()
        if after is not None:
            after.finish_reductions()

    def pack(self, x: Tensor) -> object:
        """The value that autograd saves for `x`."""
        i = None if self.gathered is None else self.gathered.place(x)
        if i is not None:
            self.saves_weights = True
            if i in self.parts:
                self.parts[i].write_back()
            local = x._local_tensor if isinstance(x, Wrapper) else x
            spec = x._spec if isinstance(x, Wrapper) else None
            version = _version(self.stored[i])[:3] if self.outer is None else None
            return SavedWeight(self, i, tuple(local.shape), local.stride(), int(local.storage_offset()), spec, version)
        if self.outer is not None:
            return Outer(self.outer[0](x))
        kept = x.detach()  # an operator that saves its result would hold its own node, which nothing would free
        with no_torch_function():
            return Kept(kept, _count_of(kept))

    def unpack(self, packed: Tensor | SavedWeight | Outer | Kept) -> Tensor:
        """The tensor that autograd saved: a weight is gathered again, and gathering for the use before it begins."""
        if isinstance(packed, Outer):
            unpacked: Tensor = self.outer[1](packed.packed)
            return unpacked
        if isinstance(packed, Kept):
            with no_torch_function():
                is_written = _count_of(packed.x) != packed.version
            if is_written:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"tensor of shape {tuple(packed.x.shape)}; write to it after the backward pass, or to a copy"
                )
            return packed.x
        if not isinstance(packed, SavedWeight):
            return packed
        x: Tensor = self.weight(packed.i, packed.version).as_strided(packed.size, packed.stride, packed.offset)
        return x if packed.spec is None else wrap(x, packed.spec)

    def reader(self) -> Callable[[int], Tensor]:
        """The function by which a backward pass reads the gathered weight of an index, if it is as it is now."""
        assert self.gathered is not None
        versions = [version[:3] for version in self.gathered.versions]
        return lambda i: self.weight(i, versions[i])

    def weight(self, i: int, version: tuple[int, ...] | None) -> Tensor:
        """The gathered local tensor number `i`, in the backward pass.

        Raises:
            RuntimeError: the stored weight has not this version any more.
        """
        now = _version(self.stored[i])
        if version not in (None, now[:3]):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight of shape {self.stored[i]._spec.shape}, gathered for the forward pass; write to it "
                "before the forward pass uses it, or after the backward pass"
            )
        if self.gathered is not None and self.gathered.versions[i] != now:
            self.gathered = None  # a hook has written to it since it was gathered
        is_first = self.gathered is None or not self.has_begun_before
        if self.gathered is None:
            after = None if self.after is None else self.after()
            if after is not None:
                after.free()  # its backward pass has ended
            self.gathered = self.begin()
        local = self.gathered.local()  # before the next gather begins, so that both do not share the network
        if is_first:
            self.has_begun_before = True
            if self.before is not None and self.before.saves_weights and self.before.gathered is None:
                self.before.gathered = self.before.begin()
        return local[i]


class GatherTogether(torch.autograd.Function):
    """Stored weights -> gathered ones; backward: their gradients, reduced by one collective to the stored layouts.

    Gradients of weights that are only cast, not gathered, are reduced by the hooks of the leaves.
    """

    @staticmethod
    def forward(ctx: Context, use: GatheredUse, needs: list[int], *stored: Wrapper) -> tuple[Wrapper, ...]:
        assert use.gathered is not None
        ctx.use, ctx.needs = use, needs
        ctx.set_materialize_grads(False)
        local = use.gathered.local()
        return tuple(wrap(local[i].detach(), use.moves[i].spec) for i in needs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Wrapper | None, ...]:
        use: GatheredUse = ctx.use
        use.free()
        stored, moves = [use.stored[i] for i in ctx.needs], [use.moves[i] for i in ctx.needs]
        weight_grads: list[Any] = [
            None if g is None else as_distributed(g, move.grad) for g, move in zip(grads, moves, strict=True)
        ]
        if torch.is_grad_enabled():
            every = zip(weight_grads, stored, moves, strict=True)
            return None, None, *[None if g is None else _reduced_recorded(g, x, move) for g, x, move in every]
        stays = accumulating() or any(x._gradient_leaf is not None and x._gradient_leaf.has_partial_sum for x in stored)
        places = [
            i
            for i, (g, move) in enumerate(zip(weight_grads, moves, strict=True))
            if not stays and g is not None and move.gathers
        ]
        out: list[Wrapper | None] = [
            None if g is None or i in places else _cast(g, x._spec.dtype)
            for i, (g, x) in enumerate(zip(weight_grads, stored, strict=True))
        ]
        gradients = [weight_grads[i] for i in places]
        del grads, weight_grads  # which would hold the whole gradients while they are reduced
        if gradients:
            reduced = use.reduce(gradients, [stored[i] for i in places], [moves[i] for i in places])
            for i, gradient in zip(places, reduced, strict=True):
                out[i] = gradient
        return None, None, *out


def _reduced(grad: Spec, x: Wrapper) -> Spec:
    """The spec of the reduced gradient of the stored weight `x`."""
    return grad if x._gradient_leaf is None else x._gradient_leaf.reduced(grad)


def _reduced_recorded(grad: Wrapper, x: Wrapper, move: LocalRedistribution) -> Wrapper:
    """The gradient of the stored weight `x`, for a backward pass that is recorded."""
    return redistribute(grad.to(_reduced(grad._spec, x).dtype), move.source_grad).to(x._spec.dtype)


def _cast(grad: Wrapper, dtype: torch.dtype) -> Wrapper:
    """The gradient cast to the dtype of its weight."""
    return grad if grad._spec.dtype is dtype else wrap(grad._local_tensor.to(dtype), grad._spec.with_dtype(dtype))


def _cast_end(end: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return end().to(dtype)


def use_of(hooks: Sequence[object]) -> GatheredUse | None:
    """The use of gathered weights whose hooks of saved tensors these are, within no others but those of such uses.

    It takes local ones, too.
    """
    use = getattr(hooks[0], "__self__", None)
    return use if isinstance(use, GatheredUse) and (use.outer is None or use_of(use.outer) is not None) else None
