"""Draw one rank's local tensor of a random tensor, from the global indices of its elements alone.

Element i of a draw, counted in row-major order over the whole tensor, is made of the random word of i, and where values
come in groups of those of its group.
A local tensor is runs of consecutive indices, one for each index of the outer dims; runs are drawn by tiles of bounded
size, so that memory beside the local tensor does not grow with it, let alone with the global tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import has_only_shape, kernel_device
from dshard.layout import Region, Shape
from dshard.ops.random.distributions import Distribution
from dshard.ops.random.state import Draw

CPU_WORDS, DEVICE_WORDS = 1 << 15, 1 << 22
"""The number of words drawn at once: on a CPU what a cache holds, elsewhere what keeps a device busy."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of `length` consecutive indices, which begin at `base` plus an index of each outer dim times its stride."""

    base: int
    length: int
    outer: tuple[tuple[int, int], ...]
    total: int

    @property
    def count(self) -> int:
        """The number of runs."""
        return prod(size for size, _ in self.outer)

    def starts(self, first: int, last: int, begin: int, device: torch.device) -> Tensor:
        """The index of element `begin` of the runs number `first` to `last - 1`."""
        base, (*rest, (_, stride)) = self.base + begin, self.outer or ((1, 1),)
        if not rest:
            return torch.arange(base + first * stride, base + last * stride, stride, device=device)
        number = torch.arange(first, last, device=device)
        start = torch.full_like(number, base)
        for size, stride in reversed(self.outer):
            start += (number % size) * stride
            number = number // size
        return start

    def phase(self, group: int) -> int | None:
        """The position in its group at which each run begins, or None where runs differ in it."""
        return None if any(stride % group for _, stride in self.outer) else self.base % group


@cached("draws", 4096)
def runs(shape: Shape, region: Region) -> Runs:
    """The elements of a region that is not empty, of a tensor of this shape.

    >>> runs((4, 6), (range(1, 3), range(2, 5)))
    Runs(base=8, length=3, outer=((2, 6),), total=24)
    """
    base, length, stride = 0, 1, 1
    outer: list[tuple[int, int]] = []
    for size, held in zip(reversed(shape), reversed(region), strict=True):
        base += held.start * stride
        if not outer and length == stride:
            length *= len(held)
        elif len(held) > 1:
            outer.append((len(held), stride))
        stride *= size
    return Runs(base, length, tuple(reversed(outer)), stride)


def fill(local: Tensor, shape: Shape, region: Region, draw: Draw, distribution: Distribution) -> None:
    """Write the values of the elements within `region`, of a global tensor of this shape, into `local`."""
    if local.numel() == 0 or has_only_shape(local):
        return
    if local.is_complex():
        fill(torch.view_as_real(local), (*shape, 2), (*region, range(2)), draw, distribution)
        return
    region_runs = runs(shape, region)
    target = local if local.is_contiguous() else torch.empty_like(local, memory_format=torch.contiguous_format)
    rows = target.view(region_runs.count, region_runs.length)
    for first, last, begin, end in _tiles(region_runs, distribution.group, local.device):
        starts = region_runs.starts(first, last, begin, local.device)
        _draw(rows[first:last, begin:end], starts, region_runs, draw, distribution)
    if target is not local:
        local.copy_(target)


def _tiles(region_runs: Runs, group: int, device: torch.device) -> Iterator[tuple[int, int, int, int]]:
    """Yield tiles: first and last run, first and last element of these."""
    limit = CPU_WORDS if kernel_device(device) == "cpu" else DEVICE_WORDS
    height = max(limit // (region_runs.length + group), 1)
    width = region_runs.length if height > 1 else max(limit // group, 1) * group
    for first in range(0, region_runs.count, height):
        last = min(first + height, region_runs.count)
        for begin in range(0, region_runs.length, width):
            yield first, last, begin, min(begin + width, region_runs.length)


def _draw(out: Tensor, starts: Tensor, region_runs: Runs, draw: Draw, distribution: Distribution) -> None:
    """The values of a tile: of as many consecutive elements from each start as `out` has columns."""
    group, (height, width) = distribution.group, out.shape
    phase = region_runs.phase(group)
    before = (group - 1) if phase is None else phase
    length = -(-(width + before) // group) * group
    first = starts if phase == 0 else starts - (starts % group if phase is None else phase)
    # nothing holds the indices, nor the words, when there is what is made of them
    values = distribution.values(words(_indices(first, length), draw.number, draw.seed)).view(height, length)
    if phase is None:
        columns = (starts - first)[:, None] + torch.arange(width, device=out.device)
        out.copy_(values.gather(1, columns))
    else:
        out.copy_(values[:, phase : phase + width])


def _indices(first: Tensor, length: int) -> Tensor:
    """So many consecutive indices from each of the first ones, one after the other."""
    columns = torch.arange(length, device=first.device)
    return columns.add_(first) if len(first) == 1 else (first[:, None] + columns).flatten()


# -- 64 random bits as a pure function of an index and a key
# Products by odd constants, each with a key of its own, and folds of the high half onto the low one, as the finalisers
# of SplitMix64 and lea64 have two of (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014; Steele,
# Vigna: LXM, 2021). Only integer operations of torch, which wrap alike on every device.

MULTIPLIERS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xDABA0B6EB09322E3, 0x94D049BB133111EB
"""Odd constants: of the golden ratio, two of SplitMix64's and one of Vigna's `lea64`."""
FOLD = 32


def _signed(word: int) -> int:
    """The number of 64 bits that torch has for a word without sign."""
    return (word & (1 << 64) - 1) - (word >> 63 << 64)


_FACTORS = tuple(map(_signed, MULTIPLIERS))


@cached("draws", 1024)
def keys(number: int, seed: int) -> tuple[int, ...]:
    """The keys of draw `number` under `seed`, both of 64 bits: a hash of both, so that draws have nothing in common."""
    digest = blake2b(struct.pack("<QQ", seed, number), digest_size=8 * len(MULTIPLIERS)).digest()
    return struct.unpack(f"<{len(MULTIPLIERS)}q", digest)


def words(x: Tensor, number: int, seed: int) -> Tensor:
    """The word of each index in `x`, of draw `number` under `seed`: (n,) -> (n,), int64, of which all bits are random.

    A fold shifts the sign in, so two numbers of which one has the other's bits inverted fall together: as some do in a
    random function, and none in a bijection.

    >>> words(torch.arange(3), 0, 0).tolist() == [words(torch.tensor([i]), 0, 0).item() for i in range(3)]
    True
    """
    for i, (factor, key) in enumerate(zip(_FACTORS, keys(number, seed), strict=True)):
        x = torch.rsub(x, key, alpha=factor)  # key - factor * x, by one kernel
        if i + 1 < len(_FACTORS):
            x.bitwise_xor_(x >> FOLD)
    return x
