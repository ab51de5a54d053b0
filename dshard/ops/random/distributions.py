"""Distributions: the four random words of 32 bits of one block give four values or two wider ones.

Only operators are used that are exact, or correctly rounded one by one, so that values are the same on every device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from math import log1p, pi

import torch
from torch import Tensor
from typing_extensions import ParamSpec

from dshard.ops.random.exact import exp, log_, root, sine_cosine_

_P = ParamSpec("_P")
WORD = 1 << 32
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""The random bits of a uniform number, as in torch: those of its mantissa."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution: (4, n) random words -> (`per_block`, n) values."""

    per_block: int
    values: Callable[[Tensor], Tensor]
    constructor: tuple[str, tuple[object, ...]] = ("", ())

    def __str__(self) -> str:
        """The distribution as text, which `named` parses."""
        name, arguments = self.constructor
        return json.dumps([name, *(str(a) if isinstance(a, torch.dtype) else a for a in arguments)])


MAKERS: dict[str, Callable[..., Distribution]] = {}
"""The constructors of distributions, by name."""


def _constructor(make: Callable[_P, Distribution]) -> Callable[_P, Distribution]:
    """Record the constructor's arguments in the distribution that it returns."""

    @wraps(make)
    def construct(*args: _P.args, **kwargs: _P.kwargs) -> Distribution:
        return replace(make(*args, **kwargs), constructor=(make.__name__, (*args, *kwargs.values())))

    MAKERS[make.__name__] = construct
    return construct


def named(text: str) -> Distribution:
    """Parse a distribution from `text`.

    >>> str(named(str(bernoulli(0.25))))
    '["bernoulli", 0.25]'
    """
    name, *arguments = json.loads(text)
    return MAKERS[name](*(getattr(torch, a[6:]) if isinstance(a, str) else a for a in arguments))


@_constructor
def uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Distribution:
    """Multiples of 2^-bits in [0, 1), with the bits of `dtype`; scaled to [low, high)."""
    bits = BITS[dtype]

    def values(words: Tensor) -> Tensor:
        unit = _unit(words) if bits == 53 else (words >> (32 - bits)).to(torch.float32).mul_(2.0**-bits)
        return _moved(unit, low, high - low)

    return Distribution(2 if bits == 53 else 4, values)


@_constructor
def normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Distribution:
    """The normal distribution. Box, Muller: A note on the generation of random normal deviates (1958)."""
    double = dtype == torch.float64

    def values(words: Tensor) -> Tensor:
        if double:
            chance, angle = _opens(words[:2]), _unit(words[2:]).sub_(0.5).mul_(pi / 2)
        else:
            chance = words[0::2].to(torch.float32).add_(0.5).mul_(1.0 / WORD)
            angle = (words[1::2] >> 8).to(torch.float32).sub_(2.0**23).mul_(pi / 2**25)
        return _moved(_box_muller(chance, angle), mean, std)

    return Distribution(2 if double else 4, values)


def _box_muller(chance: Tensor, angle: Tensor) -> Tensor:
    """Pairs of standard normal values; `angle` within pi/4 of 0."""
    radius = root(log_(chance).mul_(-2.0))
    sine, cosine = sine_cosine_(angle)
    return torch.stack([cosine.mul_(radius), sine.mul_(radius)], 1).flatten(0, 1)


@_constructor
def bernoulli(p: float) -> Distribution:
    """True with probability `p`, to within 2^-32."""
    threshold = round(p * WORD)
    return Distribution(4, lambda words: words < threshold)


@_constructor
def integers(low: int, count: int) -> Distribution:
    """Whole numbers from `low` to `low + count - 1`, by one word where `count` is small beside 2^32, else by two."""
    if count <= 1 << 28:
        return Distribution(4, lambda words: (words * count >> 32).add_(low))

    def values(words: Tensor) -> Tensor:
        wide = (words[0::2] << 32).bitwise_or_(words[1::2])
        if count <= 1 << 63:
            wide = wide.bitwise_and_((1 << 63) - 1)
            return wide.add_(low) if count == 1 << 63 else wide.remainder_(count).add_(low)
        # beyond 63 bits: subtract the count once from those not below it, compared as if they had no sign
        least = -(1 << 63)
        above = (wide ^ least) >= count - (1 << 63) if count < 1 << 64 else torch.zeros_like(wide, dtype=torch.bool)
        return torch.where(above, wide - (count - (1 << 64)), wide) + low

    return Distribution(2, values)


@_constructor
def exponential(rate: float) -> Distribution:
    """-log(u) / rate."""
    return Distribution(2, lambda words: log_(_opens(words)).mul_(-1.0 / rate))


@_constructor
def geometric(p: float) -> Distribution:
    """The number of trials until the first success: ceil(log(u) / log(1 - p))."""

    scale = -1.0 / log1p(-p) if p < 1 else 0.0
    return Distribution(2, lambda words: log_(_opens(words)).mul_(-scale).ceil_().clamp_(min=1.0))


@_constructor
def cauchy(median: float, sigma: float) -> Distribution:
    """median + sigma tan(angle)."""

    def values(words: Tensor) -> Tensor:
        quarter = _unit(words).sub_(0.5).mul_(pi / 4)
        sine, cosine = sine_cosine_(quarter)
        return (sine / cosine).mul_(sigma).add_(median)

    return Distribution(2, values)


@_constructor
def log_normal(mean: float, std: float) -> Distribution:
    """The exponential of a normal value."""
    wide = normal(torch.float64, mean, std)
    return Distribution(2, lambda words: exp(wide.values(words)))


def _moved(x: Tensor, shift: float, scale: float) -> Tensor:
    if scale != 1:
        x = x.mul_(scale)
    return x if shift == 0 else x.add_(shift)


def _unit(words: Tensor) -> Tensor:
    """Multiples of 2^-53 in [0, 1): (4, n) words -> (2, n)."""
    wide = ((words[0::2] >> 5) << 26).bitwise_or_(words[1::2] >> 6)
    return wide.to(torch.float64).mul_(2.0**-53)


def _opens(words: Tensor) -> Tensor:
    """Odd multiples of 2^-53 in (0, 1): (4, n) words -> (2, n)."""
    wide = ((words[0::2] >> 6) << 26).bitwise_or_(words[1::2] >> 6)
    return wide.to(torch.float64).add_(0.5).mul_(2.0**-52)
