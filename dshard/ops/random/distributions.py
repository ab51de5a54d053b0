"""Distributions: a random word of 64 bits gives a value, or two words two values.

Only operators are used that are exact, or correctly rounded one by one, so that values are the same on every device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from math import factorial, log, log1p, pi

import torch
from torch import Tensor
from typing_extensions import ParamSpec

_P = ParamSpec("_P")
WORD = 1 << 32
"""The values of half a word."""
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""The random bits of a uniform number, as in torch: those of its mantissa."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution: (n,) random words, of whole groups -> (n,) values, each of the words of its group."""

    values: Callable[[Tensor], Tensor]
    group: int = 1
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
        wide = torch.float64 if bits == 53 else torch.float32
        unit = (words >> (64 - bits)).to(wide).mul_(2.0**-bits)  # words have a sign
        return _moved(unit.add_(0.5), low, high - low)

    return Distribution(values)


@_constructor
def normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Distribution:
    """The normal distribution. Box, Muller: A note on the generation of random normal deviates (1958)."""
    double = dtype == torch.float64

    def values(words: Tensor) -> Tensor:
        first, second = words.view(-1, 2).unbind(1)
        if double:
            chance, angle = _opens(first), (second >> 11).to(dtype).mul_(2.0**-53).mul_(pi / 2)
        else:
            chance = _half(first).to(torch.float32).add_(0.5).mul_(1.0 / WORD)
            angle = (second >> 40).to(torch.float32).mul_(pi / 2**25)
        return _moved(_box_muller(chance, angle), mean, std)

    return Distribution(values, 2)


def _box_muller(chance: Tensor, angle: Tensor) -> Tensor:
    """Pairs of standard normal values, one after the other; `angle` within pi/4 of 0."""
    radius = root(log_(chance).mul_(-2.0))
    sine, cosine = sine_cosine_(angle)
    pairs = radius.new_empty((len(radius), 2))
    for i, each in enumerate((cosine, sine)):
        torch.mul(each, radius, out=pairs[:, i])
    return pairs.flatten()


@_constructor
def bernoulli(p: float) -> Distribution:
    """True with probability `p`, to within 2^-53."""
    threshold = round(p * 2.0**64) - (1 << 63)  # words have a sign
    return Distribution(lambda words: words < threshold if threshold < 1 << 63 else words == words)


@_constructor
def integers(low: int, count: int) -> Distribution:
    """Whole numbers from `low` to `low + count - 1`, by half a word where `count` is small beside 2^32."""
    if count <= 1 << 28:
        return Distribution(lambda words: _half(words).mul_(count).bitwise_right_shift_(32).add_(low))

    def values(wide: Tensor) -> Tensor:
        if count <= 1 << 63:
            wide = wide & (1 << 63) - 1
            return wide.add_(low) if count == 1 << 63 else wide.remainder_(count).add_(low)
        # beyond 63 bits: subtract the count once from those not below it, compared as if they had no sign
        least = -(1 << 63)
        above = (wide ^ least) >= count - (1 << 63) if count < 1 << 64 else torch.zeros_like(wide, dtype=torch.bool)
        return torch.where(above, wide - (count - (1 << 64)), wide) + low

    return Distribution(values)


@_constructor
def exponential(rate: float) -> Distribution:
    """-log(u) / rate."""
    return Distribution(lambda words: log_(_opens(words)).mul_(-1.0 / rate))


@_constructor
def geometric(p: float) -> Distribution:
    """The number of trials until the first success: ceil(log(u) / log(1 - p))."""

    scale = -1.0 / log1p(-p) if p < 1 else 0.0
    return Distribution(lambda words: log_(_opens(words)).mul_(-scale).ceil_().clamp_(min=1.0))


@_constructor
def cauchy(median: float, sigma: float) -> Distribution:
    """median + sigma tan(angle)."""

    def values(words: Tensor) -> Tensor:
        quarter = (words >> 11).to(torch.float64).mul_(2.0**-53).mul_(pi / 4)
        sine, cosine = sine_cosine_(quarter)
        return (sine / cosine).mul_(sigma).add_(median)

    return Distribution(values)


@_constructor
def log_normal(mean: float, std: float) -> Distribution:
    """The exponential of a normal value."""
    wide = normal(torch.float64, mean, std)
    return Distribution(lambda words: exp(wide.values(words)), wide.group)


def _moved(x: Tensor, shift: float, scale: float) -> Tensor:
    if scale != 1:
        x = x.mul_(scale)
    return x if shift == 0 else x.add_(shift)


def _half(words: Tensor) -> Tensor:
    """The high half of each word, without a sign."""
    return (words >> 32).bitwise_and_(WORD - 1)


def _opens(words: Tensor) -> Tensor:
    """Odd multiples of 2^-53 in (0, 1), one of each word."""
    return (words >> 12).to(torch.float64).add_(2.0**51 + 0.5).mul_(2.0**-52)


# -- logarithm, exponential, root, sine and cosine by separate sums, products and quotients
# IEEE 754 rounds these correctly, so results are the same to the bit on every device, and wherever an element stands.
# torch's own `log`, `exp`, `cos` and even `sqrt`, which MKL does not round correctly, differ between devices, and may
# differ between the vectors of a tensor and what is left at its end. No operator that could fuse a product and a sum is
# used: `add` and `sub` without alpha, no `addcmul`, no `lerp`.


@dataclass(frozen=True, slots=True)
class Format:
    """The storage format of a floating-point dtype, and the numbers of power series terms that it can distinguish."""

    bits: torch.dtype
    mantissa: int
    bias: int
    root_half: int
    log_terms: int
    sine_terms: int
    cosine_terms: int
    heron_steps: int


FORMATS = {
    torch.float32: Format(torch.int32, 23, 127, 0x3F3504F3, 5, 5, 5, 3),
    torch.float64: Format(torch.int64, 52, 1023, 0x3FE6A09E667F3BCD, 10, 8, 9, 4),
}
"""`root_half` are the bits of sqrt(1/2): mantissas are taken from there to sqrt(2), so small logarithms are good."""

LOG_2 = log(2.0)
LOG_2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LOG_2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
EXP_TERMS = 14


def log_(x: Tensor) -> Tensor:
    """The natural logarithm of positive normal numbers, to within 3 ulp; overwrites `x`.

    log m = 2 atanh(s) with s = (m - 1) / (m + 1), a series in s^2 < 0.03.
    """
    form = FORMATS[x.dtype]
    one = form.bias << form.mantissa
    bits = x.view(form.bits).add_(one - form.root_half)
    exponent = (bits >> form.mantissa).sub_(form.bias).to(x.dtype).mul_(LOG_2)
    bits.bitwise_and_((1 << form.mantissa) - 1).add_(form.root_half)
    distance = x.sub_(1.0)
    s = distance / (distance + 2.0)
    series = _horner(s * s, [2.0 / (2 * k + 1) for k in range(form.log_terms)])
    return series.mul_(s).add_(exponent)


def sine_cosine_(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of four times the angles `x`, which lie within pi/4 of 0; overwrites `x`.

    Their series, and both of the double angle, twice.
    """
    form, square = FORMATS[x.dtype], x * x
    sine = _horner(square, [(-1) ** k / factorial(2 * k + 1) for k in range(form.sine_terms)]).mul_(x)
    cosine = _horner(square, [(-1) ** k / factorial(2 * k) for k in range(form.cosine_terms)])
    return doubled(*doubled(sine, cosine))


def doubled(sine: Tensor, cosine: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of the double angle; overwrites both."""
    product = cosine.mul_(sine)
    return product.add_(product), sine.mul_(sine).mul_(-2.0).add_(1.0)


def root(x: Tensor) -> Tensor:
    """The square root of positive normal numbers; of zero, something negligible.

    Heron's method from a first guess that halves the exponent, 6 % off at most.
    """
    form = FORMATS[x.dtype]
    guess = (x.view(form.bits) >> 1).add_(form.bias << (form.mantissa - 1)).view(x.dtype)
    for _ in range(form.heron_steps):
        guess.add_(x / guess).mul_(0.5)
    return guess


def exp(x: Tensor) -> Tensor:
    """The exponential function in double precision: 2^k exp(r), with |r| <= log(2) / 2 and a series for exp(r)."""
    x = x.clamp(-746.0, 710.0)
    k = (x * (1.0 / LOG_2)).round_()
    r = (x - k * LOG_2_HIGH).sub_(k * LOG_2_LOW)
    series = _horner(r, [1.0 / factorial(n) for n in range(EXP_TERMS)])
    half = (k * 0.5).floor_()
    return series.mul_(_power(half)).mul_(_power(k.sub_(half)))


def _power(k: Tensor) -> Tensor:
    """2^k for whole numbers."""
    form = FORMATS[k.dtype]
    return (k.to(form.bits).add_(form.bias) << form.mantissa).view(k.dtype)


def _horner(x: Tensor, coefficients: list[float]) -> Tensor:
    """The polynomial with these coefficients, constant first."""
    *rest, last = coefficients
    out = torch.full_like(x, last)
    for coefficient in reversed(rest):
        out.mul_(x).add_(coefficient)
    return out
