"""Draw one rank's local tensor of a random tensor, from the global indices of its elements alone.

Element i of a draw, counted in row-major order over the whole tensor, comes from block i // per_block of the counter.
A local tensor is runs of consecutive indices, one for each index of the outer dims; runs are drawn by tiles of bounded
size, so that memory beside the local tensor does not grow with it, let alone with the global tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import has_only_shape, kernel_device
from dshard.layout import Region, Shape
from dshard.ops.random.distributions import Distribution
from dshard.ops.random.state import Draw

CPU_BLOCKS, DEVICE_BLOCKS = 1 << 15, 1 << 20
"""The number of blocks drawn at once: on a CPU what a cache holds, elsewhere what keeps a device busy."""


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

    def starts(self, first: int, last: int, device: torch.device) -> Tensor:
        """The first index of the runs number `first` to `last - 1`."""
        number = torch.arange(first, last, device=device)
        if len(self.outer) <= 1:
            return number.mul_(self.outer[0][1] if self.outer else 0).add_(self.base)
        start = torch.full_like(number, self.base)
        for size, stride in reversed(self.outer):
            start += (number % size) * stride
            number = number // size
        return start

    def phase(self, per_block: int) -> int | None:
        """The position in its block at which each run begins, or None where runs differ in it."""
        return None if any(stride % per_block for _, stride in self.outer) else self.base % per_block


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
    for first, last, begin, end in _tiles(region_runs, distribution.per_block, local.device):
        starts = region_runs.starts(first, last, local.device).add_(begin)
        _draw(rows[first:last, begin:end], starts, region_runs, draw, distribution)
    if target is not local:
        local.copy_(target)


def _tiles(region_runs: Runs, per_block: int, device: torch.device) -> Iterator[tuple[int, int, int, int]]:
    """Yield tiles: first and last run, first and last element of these."""
    limit = CPU_BLOCKS if kernel_device(device) == "cpu" else DEVICE_BLOCKS
    blocks = -(-region_runs.length // per_block) + 1
    height = max(limit // blocks, 1)
    width = region_runs.length if blocks <= limit else limit * per_block
    for first in range(0, region_runs.count, height):
        last = min(first + height, region_runs.count)
        for begin in range(0, region_runs.length, width):
            yield first, last, begin, min(begin + width, region_runs.length)


def _draw(out: Tensor, starts: Tensor, region_runs: Runs, draw: Draw, distribution: Distribution) -> None:
    """The values of a tile: of as many consecutive elements from each start as `out` has columns."""
    per_block, (height, width) = distribution.per_block, out.shape
    phase = region_runs.phase(per_block)
    blocks = -(-(width + (per_block - 1 if phase is None else phase)) // per_block)
    first = starts // per_block
    counters = (first[:, None] + torch.arange(blocks, device=out.device)).flatten()
    values = distribution.values(words(counters, draw.number, draw.seed, wide=region_runs.total // per_block >> 32 > 0))
    lanes = values.view(per_block, height, blocks)
    if phase == 0 and width == blocks * per_block:
        _interleave(lanes, out)
        return
    buffer = out.new_empty((height, blocks * per_block))
    _interleave(lanes, buffer)
    if phase is not None:
        out.copy_(buffer[:, phase : phase + width])
    else:
        columns = (starts - first * per_block)[:, None] + torch.arange(width, device=out.device)
        out.copy_(buffer.gather(1, columns))


def _interleave(lanes: Tensor, out: Tensor) -> None:
    """Lane k of every block becomes its element k."""
    for k, lane in enumerate(lanes):
        out[:, k :: len(lanes)].copy_(lane)


# -- Philox4x32-10: 128 random bits as a pure function of a 128-bit counter and a 64-bit key
# Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 3.3. Only integer
# operations of torch, which are the same on every device; words of 32 bits live in int64, where their products wrap as
# C's do.

Word: TypeAlias = Tensor | int
"""A word of 32 bits: one for each counter, in an int64 tensor, or one int for all."""

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> list[Word]:
    """The four output words for each counter. Words that are the same for all counters may be plain ints.

    >>> [hex(word) for word in philox((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _mixed(p1, c1, k0), p1, _mixed(p0, c3, k1), p0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1 & MASK, c2, c3 & MASK]


def _mixed(product: Word, word: Word, key: int) -> Word:
    """The high word of a product, xor two more words; of `word` only the low 32 bits count."""
    high = product >> 32
    if isinstance(word, int):
        high = high ^ ((word & MASK) ^ key)
    else:
        high = word ^ (high & MASK) if isinstance(high, int) else high.bitwise_xor_(word)
        high = high.bitwise_xor_(key)
    return high & MASK if isinstance(high, int) else high.bitwise_and_(MASK)


def words(blocks: Tensor, number: int, seed: int, wide: bool = False) -> Tensor:
    """The four words of each block of draw `number` under `seed`, both of 64 bits: (n,) -> (4, n), int64.

    Blocks are not negative; those beyond 32 bits need `wide`.
    """
    low, high = (blocks & MASK, blocks >> 32) if wide else (blocks, 0)
    mixed = philox((low, high, number & MASK, number >> 32), (seed & MASK, seed >> 32))
    return torch.stack([word for word in mixed if isinstance(word, Tensor)])
