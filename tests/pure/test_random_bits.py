"""The generator against its definition, its values against their distributions, and the same in any company."""

from __future__ import annotations

from math import erf, pi, prod, sqrt
from weakref import WeakValueDictionary

import pytest
import torch
from helpers.default_cases import one_way_each
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dshard.ops.random import distributions, draw
from dshard.ops.random.distributions import (
    Distribution,
    bernoulli,
    cauchy,
    exponential,
    geometric,
    integers,
    log_normal,
    normal,
    uniform,
)
from dshard.ops.random.draw import MULTIPLIERS, keys, words
from dshard.ops.random.state import Draw

N = 40_000


# -- words


def word(index: int, number: int, seed: int) -> int:
    """The word of an index by whole numbers of Python, of 64 bits with a sign."""
    x, whole = index, 1 << 64
    for i, (factor, key) in enumerate(zip(MULTIPLIERS, keys(number, seed), strict=True)):
        x = (key - factor * x + whole // 2) % whole - whole // 2
        x ^= x >> 32 if i < 3 else 0
    return x


def test_words_are_those_of_their_indices() -> None:
    indices = torch.tensor([0, 1, 2, 77, 2**32 - 1, 2**32, 3 << 40, 2**63 - 1])
    number, seed = 5 + (9 << 32), 0xDEADBEEF12345678
    assert words(indices, number, seed).tolist() == [word(i, number, seed) for i in indices.tolist()]


def test_draws_and_seeds_have_nothing_in_common() -> None:
    """Neighbouring draws, seeds, and both changed for each other: their words are as far apart as independent ones."""
    pairs = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2**63, 0), (0, 2**64 - 1)]
    found = torch.stack([words(torch.arange(N), *pair) for pair in pairs])
    bits = torch.stack([(found >> k) & 1 for k in range(64)], -1).double().flatten(1) - 0.5
    together = bits @ bits.T / bits.shape[1] * 4 - torch.eye(len(pairs))
    assert together.abs().max() < 5 / sqrt(bits.shape[1])


def test_each_bit_is_set_half_of_the_time_and_bits_are_independent() -> None:
    found = words(torch.arange(N), 3, 17)
    bits = torch.stack([(found >> k) & 1 for k in range(64)]).double() - 0.5

    bound = 5 / sqrt(bits.shape[1])
    assert (bits.mean(1).abs() * 2).max() < bound
    assert ((bits @ bits.T / bits.shape[1] * 4) - torch.eye(64)).abs().max() < bound
    assert (bits[:, 1:] * bits[:, :-1] * 4).mean(1).abs().max() < bound  # neighbours


# -- exact functions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_are_what_they_are_called(dtype) -> None:
    unit = (torch.arange(1, N, dtype=torch.float64) / N).to(dtype)
    angle = (unit - 0.5) * (pi / 2)
    wide, eps = unit.double(), torch.finfo(dtype).eps
    sine, cosine = distributions.sine_cosine_(angle.clone())

    torch.testing.assert_close(distributions.log_(unit.clone()).double(), wide.log(), rtol=3 * eps, atol=0)
    torch.testing.assert_close(
        distributions.root(unit * 70).double(), (unit * 70).double().sqrt(), rtol=2 * eps, atol=0
    )
    torch.testing.assert_close(sine.double(), (4 * angle.double()).sin(), rtol=0, atol=8 * eps)
    torch.testing.assert_close(cosine.double(), (4 * angle.double()).cos(), rtol=0, atol=8 * eps)


def test_the_exponential_function_over_its_whole_range() -> None:
    x = torch.linspace(-744, 709, N, dtype=torch.float64)
    torch.testing.assert_close(distributions.exp(x), x.exp(), rtol=1e-15, atol=1e-322)
    assert distributions.exp(torch.tensor([-1e9, 1e9], dtype=torch.float64)).tolist() == [0.0, float("inf")]


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform float32": uniform(torch.float32, -1.5, 2.1),
    "uniform float64": uniform(torch.float64, -1.5, 2.1),
    "uniform bfloat16": uniform(torch.bfloat16),
    "uniform float16": uniform(torch.float16),
    "normal float32": normal(torch.float32, 0.3, 1.7),
    "normal float64": normal(torch.float64, 0.3, 1.7),
    "bernoulli": bernoulli(0.3),
    "integers": integers(-7, 1000),
    "integers of two words": integers(-(1 << 62), (1 << 63) - 5),
    "exponential": exponential(1.5),
    "geometric": geometric(0.2),
    "cauchy": cauchy(0.5, 2.0),
    "log_normal": log_normal(0.1, 0.7),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_value_is_the_same_in_any_company(name) -> None:
    """Whatever the size and alignment of the batch it is computed in: vectors, tails of vectors, alone."""
    distribution = DISTRIBUTIONS[name]
    together, group = distribution.values(words(torch.arange(1000), 1, 2)), distribution.group
    for first in range(0, 80 * group, 19 * group):
        for length in (*range(group, 40 * group, group), 100, 334):
            some = distribution.values(words(torch.arange(first, first + length), 1, 2))
            assert torch.equal(some, together[first : first + length])


# -- distributions


DISCRETE = ("bernoulli", "integers", "geometric")


def values(distribution: Distribution, n: int = N, dtype: torch.dtype = torch.float64) -> Tensor:
    out = torch.empty(n, dtype=dtype)
    draw.fill(out, (n,), (range(n),), Draw(2024, 7), distribution)
    return out


def chance_below(name: str, x: Tensor) -> Tensor:
    match name.split()[0]:
        case "uniform":
            return (x + 1.5) / 3.6 if name[-2:] in ("32", "64") else x
        case "normal":
            return (1 + torch.erf((x - 0.3) / 1.7 / sqrt(2))) / 2
        case "exponential":
            return 1 - torch.exp(-1.5 * x)
        case "cauchy":
            return torch.atan((x - 0.5) / 2.0) / pi + 0.5
        case _:
            return (1 + torch.erf((x.log() - 0.1) / 0.7 / sqrt(2))) / 2


@pytest.mark.parametrize(
    "name", [n for n in DISTRIBUTIONS if n.split()[0] not in ("bernoulli", "integers", "geometric")]
)
def test_values_are_distributed_as_they_should(name) -> None:
    """Kolmogorov and Smirnov's distance; 2.0 / sqrt(n) is exceeded once in 1,500 times, and the seed is fixed."""
    found = values(DISTRIBUTIONS[name]).sort().values
    below = chance_below(name, found)
    steps = torch.arange(N + 1, dtype=torch.float64) / N
    coarse = 2.0**-8 if name.endswith("float16") else 0.0

    assert max((below - steps[:-1]).abs().max(), (below - steps[1:]).abs().max()) < 2.0 / sqrt(N) + coarse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_values_have_independent_neighbours_and_tails(dtype) -> None:
    found = values(normal(dtype), 1 << 19, dtype).double()
    n = found.numel()

    for lag in (1, 2, 3, 4):
        assert (found[lag:] * found[:-lag]).mean().abs() < 5 / sqrt(n)
        assert ((found[lag:].square() - 1) * (found[:-lag].square() - 1)).mean().abs() < 10 / sqrt(n)
    for edge in (2.0, 3.0, 4.0):
        expected = n * (1 - erf(edge / sqrt(2)))
        assert abs(int((found.abs() > edge).sum()) - expected) < 5 * sqrt(expected)
    assert abs(found.mean()) < 5 / sqrt(n)
    assert abs(found.var() - 1) < 5 * sqrt(2 / n)
    assert abs(found.pow(4).mean() - 3) < 5 * sqrt(96 / n)


@pytest.mark.parametrize(("p", "n"), [(0.0, N), (0.1, N), (0.5, N), (0.999, N), (1.0, N)])
def test_bernoulli_is_true_as_often_as_its_probability(p, n) -> None:
    assert abs(values(bernoulli(p)).sum().item() - n * p) <= 5 * sqrt(n * p * (1 - p))


def test_geometric_has_the_probability_of_each_count() -> None:
    found = values(geometric(0.2))
    for k in range(1, 12):
        chance = 0.2 * 0.8 ** (k - 1)
        assert abs((found == k).sum().item() - N * chance) < 5 * sqrt(N * chance)
    assert (values(geometric(1.0)) == 1).all()
    assert abs(values(geometric(1e-12)).mean().item() * 1e-12 - 1) < 5 / sqrt(N)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000])
def test_integers_are_all_equally_likely(count) -> None:
    found = values(integers(-3, count), dtype=torch.int64)
    assert found.min() >= -3
    assert found.max() <= -3 + count - 1
    counts = torch.bincount(found + 3, minlength=count).double()
    excess = ((counts - N / count) ** 2 / (N / count)).sum().item()  # chi square, with count - 1 degrees
    assert excess <= count - 1 + 5 * sqrt(2 * count)


@pytest.mark.parametrize("bits", [27, 28, 29, 40, 62, 63, 64])
@pytest.mark.parametrize("less", [0, 1, 12345])
def test_integers_of_wide_ranges_stay_within_them_and_fill_them(bits, less) -> None:
    count = 2**bits - less
    low = -(2**63) if bits == 64 else -5
    found = values(integers(low, count), 10_000, torch.int64)
    high = low + count - 1
    assert low <= found.min()
    assert found.max() <= high
    for part in range(4):
        share = ((found.double() >= low + count * part / 4) & (found.double() < low + count * (part + 1) / 4)).sum()
        assert abs(share.item() - 2500) < 250


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)]
)
def test_uniform_values_are_as_fine_as_those_of_torch(dtype, bits) -> None:
    found = values(uniform(dtype), dtype=dtype).double() * 2.0**bits
    assert torch.equal(found, found.round())
    assert (found.long() % 2).double().mean() > 0.4
    assert found.min() >= 0
    assert found.max() < 2**bits


# -- parts


def reference(index: int) -> float:
    return (word(index, 7, 2024) >> 40) * 2.0**-24 + 0.5


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((2**20, 2**20), (range(2**19, 2**19 + 3), range(5, 16))),
        ((2**11, 3, 2**30 + 1), (range(2**11 - 2, 2**11), range(1, 3), range(7, 8))),
        ((2**40,), (range(2**40 - 13, 2**40 - 2),)),
        ((3, 2**38), (range(3), range(2**38 - 3, 2**38))),
    ],
)
def test_a_part_of_a_tensor_too_large_to_exist(shape, region) -> None:
    """A petabyte and more: only what is held is computed, each value from its own global index."""
    local = torch.empty([len(held) for held in region])
    draw.fill(local, shape, region, Draw(2024, 7), uniform(torch.float32))

    indices = torch.cartesian_prod(*(torch.tensor(held) for held in region)).view(-1, len(shape)).tolist()
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    expected = [reference(sum(i * s for i, s in zip(index, strides, strict=True))) for index in indices]
    assert local.flatten().tolist() == expected


class Peak(TorchDispatchMode):
    """The most bytes that the tensors made by operators hold together, but those of `out`."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out, self.alive, self.nbytes = out.data_ptr(), WeakValueDictionary(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.alive |= {id(t): t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)}
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in list(self.alive.values())}
        self.nbytes = max(self.nbytes, sum(n for at, n in held.items() if at != self.out))
        return out


def peak(rows: int, held: range, distribution: Distribution) -> int:
    out = torch.empty(rows, len(held))
    with Peak(out) as seen:
        draw.fill(out, (1 << 20, 4 << 10), (range(rows), held), Draw(0, 0), distribution)
    return seen.nbytes


@pytest.mark.parametrize(
    ("distribution", "held"),
    one_way_each(
        [uniform(torch.float32), normal(torch.float32), bernoulli(0.5)],
        [range(1 << 10, 3 << 10), range(4 << 10), range(3, 2048)],
    ),
)
def test_memory_beside_the_part_is_that_of_a_tile(distribution, held, monkeypatch) -> None:
    """However large the part, and much less for a smaller tile; nothing for an empty part."""
    monkeypatch.setattr(draw, "CPU_WORDS", 1 << 12)
    small, large = peak(32, held, distribution), peak(256, held, distribution)

    assert 0 < small == large < 20 * 8 * draw.CPU_WORDS
    assert peak(0, held, distribution) == 0
