"""Random operators: each rank draws its local tensor of the global tensor; other operators are composed of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

from dshard.comm import DRAW, are_simulated, compare_draws, has_only_shape, plain, recorded, traced
from dshard.core.call import LocalOp, overloads
from dshard.core.moves import redistribute_local, run_on_ranks, write_local
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import contiguous_spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import CompileError
from dshard.layout import Region, Shape, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops.custom import Custom, check, decomposed
from dshard.ops.random import distributions, draw
from dshard.ops.random.distributions import Distribution, named
from dshard.ops.random.draw import words
from dshard.ops.random.state import Draw, next_draw
from dshard.redistribute.blocks import unflattened_shape
from dshard.rules.strategy import completed_layout
from dshard.torch_private import OpOverload, TracingContext, no_torch_dispatch, torch_check

aten = torch.ops.aten
Make: TypeAlias = Callable[..., Distribution]
"""The distribution for a real dtype and the operator's arguments."""
_UNUSED = Generator()


def is_random(func: OpOverload) -> bool:
    """Whether torch says that the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def draw_for(mesh: Mesh, what: object, generator: Generator | None = None) -> Draw:
    """Take the next draw for a tensor on `mesh`, or one seeded by torch's `generator`, that all ranks advance alike."""
    if TracingContext.try_get() is not None:
        raise CompileError(
            f"{what}, within a compiled region: it draws random values that are not made element by element, "
            "and would draw the same each time; call it outside"
        )
    call_draw = recorded(DRAW, next_draw, generator)
    compare_draws(f"draw {call_draw.number} of seed {call_draw.seed}, for {what}", mesh)
    return call_draw


def filled(
    x: Wrapper, make: Make, what: object, generator: Generator | None = None, repeated: Draw | None = None
) -> Wrapper:
    """Overwrite the distributed tensor `x` with random values; if it is partial, so that its reduction gives them.

    They are those of the next draw, or of a `repeated` one.
    """
    spec = x._spec
    layout = completed_layout(spec.layout)
    later = traced(x._local_tensor) and repeated is None
    if later and generator is not None:
        raise CompileError(f"{what} with a generator, within a compiled region: draw without one, or outside")
    call_draw = None if later else repeated or draw_for(layout.mesh, what, generator)
    distribution = make(spec.dtype)
    simulated = are_simulated([x._local_tensor])  # whose mode would look at each of the many operators
    cuts = layout.blocks  # the numbers of elements are those of the tensor with these dims unflattened
    shape = unflattened_shape(spec.shape, cuts)

    def local_op(coordinate: Coordinate) -> LocalOp:
        region = layout.unflattened(cuts).region(shape, coordinate)

        def fill(drawn: Tensor, call_draw: Draw) -> None:
            draw.fill(_unflattened(drawn, cuts), shape, region, call_draw, distribution)

        def write(local: Tensor) -> Tensor:
            if call_draw is None:
                drawn = filled_later(_unflattened(local, cuts), shape, region, distribution).reshape(local.shape)
                return local.copy_(drawn) if layout == spec.layout else drawn
            drawn = local if layout == spec.layout else torch.empty_like(local)
            with no_torch_dispatch() if simulated else nullcontext():
                recorded((what, spec, region), fill, drawn, call_draw)
            return drawn

        return write

    with torch.no_grad():
        drawn = run_on_ranks(layout.mesh, local_op, (x._local_tensor,), {})
        if layout != spec.layout:
            write_local(x._local_tensor, redistribute_local(drawn, spec.with_layout(layout), spec.layout, what))
    return x


def _unflattened(local: Tensor, cuts: Mapping[int, int]) -> Tensor:
    """A view of a local tensor with each dim of `cuts` unflattened into so many blocks and the rest."""
    for dim in sorted(cuts, reverse=True):
        local = local.unflatten(dim, (cuts[dim], local.shape[dim] // cuts[dim]))
    return local


# -- in place, and new tensors like another


def overwriting(make: Make) -> Function:
    """An implementation of normal_, uniform_ and their like, in place or of a new tensor like the first operand."""

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        x, *rest, generator = bound(func, args, kwargs)
        _refuse(func, x.dtype, rest)
        if not func._schema.is_mutable:
            x = aten.empty_like.default(x)
        return filled(x, lambda dtype: make(dtype, *rest), func, generator)

    return run


def bound(func: OpOverload, args: Args, kwargs: Kwargs) -> list[Any]:
    """All arguments in the order of the schema, with defaults for those that are not given."""
    rest = func._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value if a.has_default_value() else None) for a in rest)]


def _refuse(func: OpOverload, dtype: torch.dtype, rest: list[object]) -> None:
    """Let torch refuse arguments that it would refuse on one device."""
    with plain(), no_torch_dispatch():  # which has no generator for tensors of a trace
        func(torch.empty(0, dtype=dtype, device="cpu"), *rest, generator=_UNUSED)


def like(make: Make) -> Function:
    """An implementation of rand_like, randn_like and randint_like."""

    def run(
        x: Any, *rest: Any, generator: Generator | None = None, dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        bounds = [int(bound) for bound in rest]
        out = aten.empty_like.default(x, dtype=dtype, **options)
        return filled(out, lambda dtype: make(dtype, *bounds), "a tensor like another", generator)

    return run


# -- distributions by the names of torch


def uniform(dtype: torch.dtype, low: float = 0.0, to: float = 1.0) -> Distribution:
    """The uniform distribution in [0, 1), in both parts of a complex number."""
    return distributions.uniform(dtype.to_real() if dtype.is_complex else dtype, low, to)


def _random(dtype: torch.dtype, low: int = 0, to: int | None = None) -> Distribution:
    """Whole numbers from `low`, and below `to` or up to the last of those that the dtype counts exactly."""
    if dtype == torch.bool:
        largest = 1
    else:
        largest = 2 ** distributions.BITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max
    return distributions.integers(low, (largest + 1 if to is None else to) - low)


def integers(dtype: torch.dtype, *bounds: int) -> Distribution:
    """Whole numbers below the last bound, from the first of two or from 0."""
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return _random(dtype, low, high)


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Distribution:
    return distributions.bernoulli(p)


def standard_normal(dtype: torch.dtype) -> Distribution:
    """The standard normal distribution; the parts of a complex number have half its variance each."""
    return distributions.normal(dtype.to_real(), 0.0, 0.5**0.5) if dtype.is_complex else distributions.normal(dtype)


def normal_(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The normal distribution; of complex numbers both parts have half the variance, and the mean is real."""
    if not args[0].dtype.is_complex:
        return overwriting(distributions.normal)(func, args, kwargs)
    x, mean, std, generator = bound(func, args, kwargs)
    _refuse(func, x.dtype, [mean, std])
    values = like(standard_normal)(x, generator=generator) * std + mean
    return x.copy_(values) if func._schema.is_mutable else values


# -- made of these


def bernoulli(p: Tensor, *, generator: Generator | None = None) -> Any:
    """`torch.bernoulli`: 1 with the probability that each element is."""
    return bernoulli_like(p, p, generator=generator)


def bernoulli_like(x: Tensor, p: Tensor, *, generator: Generator | None = None) -> Tensor:
    """`torch.bernoulli` of a new tensor like `x`, whose elements have the probabilities `p`, broadcast."""
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    chance: Tensor = like(uniform)(x, dtype=dtype, generator=generator)
    return (chance < p).to(x.dtype)


def in_place(function: Function) -> Function:
    """`function`, whose result overwrites its first argument."""
    return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))


def normal_of_tensors(mean: Any, std: Any = 1.0, *, generator: Generator | None = None) -> Any:
    """`torch.normal`: a normal value for each mean and deviation, broadcast; one of them may be a number."""
    both = isinstance(mean, Tensor) and isinstance(std, Tensor)
    shaped = mean + std if both else mean if isinstance(mean, Tensor) else std
    return like(standard_normal)(shaped, generator=generator) * std + mean


def native_dropout(
    x: Tensor, p: float, train: bool | None = None, repeated: Draw | None = None
) -> tuple[Tensor, Tensor]:
    """Dropout: zero with probability `p`, by a new draw or a `repeated` one, other elements scaled up; and the mask."""
    mask = aten.empty_like.default(x, dtype=torch.bool)
    if train is False:
        return x.clone(), mask.fill_(True)
    mask = filled(mask, lambda _: distributions.bernoulli(1.0 - p), "dropout", repeated=repeated)
    return x * mask * kept_factor(p), mask


def kept_factor(p: float) -> float:
    """The factor of the elements that dropout leaves."""
    return 0.0 if p == 1 else 1.0 / (1.0 - p)


def rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> tuple[Tensor, Tensor]:
    """`rrelu`: negative elements times a random slope, and the slopes; when not training, times the mean slope."""
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slope = like(uniform)(x, generator=generator) * (upper - lower) + lower
    slope = torch.where(x > 0, torch.ones_like(x), slope)
    return x * slope, slope


def rrelu_with_noise(x: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`rrelu_with_noise`: like `torch.rrelu`, with the slopes written into `noise`."""
    out, slopes = rrelu(x, noise, *args, **kwargs)
    noise.copy_(slopes)
    return out


# -- replicated on every rank


def multinomial(func: OpOverload, args: Args, kwargs: Kwargs) -> Wrapper:
    """`torch.multinomial`: indices drawn by the weights of each row, by every rank from the gathered weights."""
    x, count, replacement, generator = bound(func, args, kwargs)
    mesh, shape = x._spec.layout.mesh, (*x.shape[:-1], count)
    check(func, (x, count, replacement), {})
    call_draw = draw_for(mesh, func, generator)
    local = redistribute_local(x._local_tensor, x._spec, replicated(mesh), func)
    sample = partial(_sample, count=count, replacement=replacement and count > 1)
    key = func, count, replacement
    out = run_on_ranks(mesh, lambda coordinate: lambda x: recorded(key, sample, x, call_draw), (local,), {})
    return wrap(out, contiguous_spec(replicated(mesh), shape, torch.int64, x._spec.device))


def _sample(weights: Tensor, call_draw: Draw, count: int, replacement: bool) -> Tensor:
    """Sample indices: with replacement, by the cumulative weights; without, the first of an exponential race."""
    if has_only_shape(weights):
        return weights.new_empty((*weights.shape[:-1], count), dtype=torch.int64)
    weights = weights.double()
    valid = bool(((weights >= 0) & weights.isfinite()).all())  # the same on all ranks: so is what they raise
    torch_check(valid, lambda: "probability tensor contains either `inf`, `nan` or element < 0")
    positive = bool((weights.sum(-1) > 0).all())
    torch_check(positive, lambda: "invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement:
        clocks = _drawn(tuple(weights.shape), distributions.exponential(1.0), call_draw, weights.device)
        return (weights / clocks).topk(count, -1).indices
    sums = weights.cumsum(-1)
    chance = _drawn((*weights.shape[:-1], count), distributions.uniform(torch.float64), call_draw, weights.device)
    return torch.searchsorted(sums, chance.mul_(sums[..., -1:]), right=True).clamp_(max=weights.shape[-1] - 1)


def _drawn(shape: tuple[int, ...], distribution: Distribution, call_draw: Draw, device: torch.device) -> Tensor:
    """All elements of a random tensor."""
    out = torch.empty(shape, dtype=torch.float64, device=device)
    region = tuple(map(range, shape))
    recorded(("all elements", shape), lambda x, of: draw.fill(x, shape, region, of, distribution), out, call_draw)
    return out


def permutation(n: int, call_draw: Draw) -> Tensor:
    """A random permutation of the numbers below `n`: their order by random keys."""
    with plain():
        return _drawn((n,), distributions.uniform(torch.float64), call_draw, torch.device("cpu")).argsort(stable=True)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block torch's generators begin with `seed`; afterwards they are as before."""
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def _seed_of(draw: Draw) -> int:
    """The seed for torch's generators that stands for a draw."""
    with plain():
        word = words(torch.zeros(1, dtype=torch.int64, device="cpu"), draw.number, draw.seed)
    return int(word) >> 2 & (1 << 62) - 1


def seeded_alike(what: str, mesh: Mesh, device: torch.device) -> AbstractContextManager[None]:
    """Within the block torch's generators draw the same on all ranks of `mesh`: they begin with a seed of dshard's."""
    return seeded(_seed_of(draw_for(mesh, what)), device)


def seeded_op(func: OpOverload, mesh: Mesh, device: torch.device, kwargs: Kwargs) -> LocalOp:
    """Run `func` by torch's generator, seeded alike on every rank: for operators that dshard does not draw itself."""
    call_draw = draw_for(mesh, func, kwargs.get("generator"))

    def call(*args: object, **kwargs: object) -> Any:
        kwargs.pop("generator", None)

        def run(call_draw: Draw, *operands: object) -> Any:
            with seeded(_seed_of(call_draw), device):
                return func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))

        return recorded((func, *kwargs), run, call_draw, *args, *kwargs.values())

    return call


# -- in a compiled graph: the draw is taken when the graph runs, not when it is traced


_SIGN = 1 << 63
_SITES = count()
_LIBRARY = torch.library.Library("dshard", "DEF")
# `site` tells the draws of a graph apart, for equal calls would be merged. A checkpointed region takes its draws again
# in the backward pass, under the state that torch's generator for the device of `anchor` had: the CPU's has our mark.
_LIBRARY.define("next_draw(Tensor anchor, int site) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("drawn(Tensor like, Tensor draw, int[] shape, int[] starts, int[] stops, str distribution) -> Tensor")


def filled_later(like: Tensor, shape: Shape, region: Region, distribution: Distribution) -> Tensor:
    """A tensor like the local tensor `like` with the elements in `region` of a global random tensor of this shape."""
    starts, stops = [part.start for part in region], [part.stop for part in region]
    taken = torch.ops.dshard.next_draw(torch.empty(0), next(_SITES))
    local: Tensor = torch.ops.dshard.drawn(like, taken, list(shape), starts, stops, str(distribution))
    return local


def _next_draw(anchor: Tensor, site: int) -> Tensor:
    draw = next_draw(None)
    return torch.tensor([draw.seed - _SIGN, draw.number])


def _drawn_later(
    like: Tensor, draw_: Tensor, shape: Sequence[int], starts: Sequence[int], stops: Sequence[int], distribution: str
) -> Tensor:
    seed, number = draw_.tolist()
    out = torch.empty_like(like)
    draw.fill(out, tuple(shape), tuple(map(range, starts, stops)), Draw(seed + _SIGN, number), named(distribution))
    return out


_LIBRARY.impl("next_draw", _next_draw, "CompositeExplicitAutograd")
_LIBRARY.impl("drawn", _drawn_later, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dshard::next_draw", lambda anchor, site: anchor.new_empty(2, dtype=torch.int64), lib=_LIBRARY
)
torch.library.register_fake("dshard::drawn", lambda like, *rest: torch.empty_like(like), lib=_LIBRARY)


_OVERWRITING: dict[str, Make] = {
    "uniform": uniform,
    "random": _random,
    "exponential": lambda dtype, lambd=1.0: distributions.exponential(lambd),
    "geometric": lambda dtype, p: distributions.geometric(p),
    "cauchy": lambda dtype, median=0.0, sigma=1.0: distributions.cauchy(median, sigma),
    "log_normal": lambda dtype, mean=1.0, std=2.0: distributions.log_normal(mean, std),
}
_LIKE: dict[str, Make] = {"rand_like": uniform, "randn_like": standard_normal, "randint_like": integers}

RANDOM: dict[OpOverload, Custom] = {
    **{
        func: overwriting(make)
        for name, make in _OVERWRITING.items()
        for form in (name, f"{name}_")
        for func in overloads(form)
    },
    **{func: decomposed(like(make)) for name, make in _LIKE.items() for func in overloads(name)},
    aten.random_.to: overwriting(integers),
    aten.random.to: overwriting(integers),
    aten.normal_.default: normal_,
    aten.normal_functional.default: normal_,
    aten.bernoulli_.float: overwriting(_bernoulli),
    aten.bernoulli.p: overwriting(_bernoulli),
    aten.bernoulli.default: decomposed(bernoulli),
    aten.bernoulli.Tensor: decomposed(bernoulli_like),
    aten.bernoulli_.Tensor: decomposed(in_place(bernoulli_like)),
    **{func: decomposed(normal_of_tensors) for func in (aten.normal.Tensor_float, aten.normal.Tensor_Tensor)},
    aten.normal.float_Tensor: decomposed(normal_of_tensors),
    aten.native_dropout.default: decomposed(native_dropout),
    aten.rrelu_with_noise.default: decomposed(rrelu_with_noise),
    aten.rrelu_with_noise_.default: decomposed(in_place(rrelu_with_noise)),
    aten.rrelu_with_noise_functional.default: decomposed(rrelu),
    aten.multinomial.default: multinomial,
}
"""The functions that replace torch's random operators; any other runs by `seeded_op`."""
