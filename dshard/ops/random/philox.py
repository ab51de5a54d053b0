"""Philox4x32-10: 128 random bits as a pure function of a 128-bit counter and a 64-bit key.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 3.3. Only integer operations
of torch, which are the same on every device; words of 32 bits live in int64, where their products wrap as C's do.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

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
        p0, p1 = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = _mixed(p1, c1, k0), p1, _mixed(p0, c3, k1), p0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1 & MASK, c2, c3 & MASK]


def _product(x: Word, multiplier: int) -> Word:
    return x * multiplier


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
