"""Logarithm, exponential, root, sine and cosine by separate sums, products and quotients.

IEEE 754 rounds these correctly, so results are the same to the bit on every device, and wherever an element stands.
torch's own `log`, `exp`, `cos` and even `sqrt`, which MKL does not round correctly, differ between devices, and may
differ between the vectors of a tensor and what is left at its end. No operator that could fuse a product and a sum is
used: `add` and `sub` without alpha, no `addcmul`, no `lerp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial, log

import torch
from torch import Tensor


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
