"""Factories of distributed tensors, and the layout of whole modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from dshard import comm
from dshard.autograd.crossing import redistribute
from dshard.comm import DeviceMesh, as_mesh
from dshard.compile.graph_functions import traceable
from dshard.core.signature import Args
from dshard.core.spec import contiguous_spec
from dshard.core.transforms import constant
from dshard.core.wrapper import wrap
from dshard.errors import ArgumentError, DtypeError, ShapeError
from dshard.layout import Layout, layout_of, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops import random
from dshard.placements import Placement
from dshard.tensor import DTensor, as_dtensor
from dshard.validate import as_int, as_shape, is_symbolic, shown, suggestion


class FactoryOptions(TypedDict, total=False):
    """Options of factories: those of torch, the mesh (by default the current one), and placements (all replicated)."""

    device_mesh: DeviceMesh | Mesh | None
    placements: Sequence[Placement] | None
    dtype: torch.dtype | None
    requires_grad: bool
    generator: torch.Generator | None


class SizedOptions(FactoryOptions, total=False):
    """Options of factories whose sizes, and bounds, may have names."""

    size: Sequence[int]
    low: int
    high: int


@traceable
@constant
def zeros(*sizes: object, **options: Unpack[SizedOptions]) -> DTensor:
    """A DTensor of zeros; `dtype` and `requires_grad` as in `torch.zeros`."""
    return _new(torch.zeros, sizes, options)


@traceable
@constant
def ones(*sizes: object, **options: Unpack[SizedOptions]) -> DTensor:
    """A DTensor of ones; `dtype` and `requires_grad` as in `torch.ones`."""
    return _new(torch.ones, sizes, options)


@traceable
@constant
def empty(*sizes: object, **options: Unpack[SizedOptions]) -> DTensor:
    """An uninitialised DTensor; `dtype` and `requires_grad` as in `torch.empty`."""
    return _new(torch.empty, sizes, options)


@traceable
@constant
def full(size: Sequence[int], fill_value: float, **options: Unpack[FactoryOptions]) -> DTensor:
    """A DTensor of which every element is `fill_value`; `dtype` and `requires_grad` as in `torch.full`."""
    return _new(lambda shape, **kw: torch.full(shape, fill_value, **kw), (size,), options)


@traceable
@constant
def rand(*sizes: object, **options: Unpack[SizedOptions]) -> DTensor:
    """A DTensor uniform on [0, 1): the same values on every mesh and layout under `manual_seed`.

    `dtype`, `requires_grad` and `generator`, alike on all ranks, as in `torch.rand`.
    """
    return _random("rand", torch.rand, random.uniform, sizes, options)


@traceable
@constant
def randn(*sizes: object, **options: Unpack[SizedOptions]) -> DTensor:
    """A standard normal DTensor: the same values on every mesh and layout under `manual_seed`.

    `dtype`, `requires_grad` and `generator`, alike on all ranks, as in `torch.randn`.
    """
    return _random("randn", torch.randn, random.standard_normal, sizes, options)


@traceable
@constant
def randint(*args: object, **options: Unpack[SizedOptions]) -> DTensor:
    """`randint([low,] high, size)`: whole numbers from `low`, or 0, and below `high`; int64 by default.

    The same values on every mesh and layout under `manual_seed`.
    """
    bounds, size = _bounds(args, options)
    options.setdefault("dtype", torch.int64)
    return _random(
        "randint", partial(torch.randint, *bounds), lambda dtype: random.integers(dtype, *bounds), (size,), options
    )


@traceable
@constant
def randperm(n: int, **options: Unpack[FactoryOptions]) -> DTensor:
    """The numbers from 0 to n - 1 in random order, int64 by default; each rank makes all and keeps its own.

    The same order on every mesh and layout under `manual_seed`.
    """
    _check_options("randperm", options, {"dtype", "requires_grad", "generator"})
    dtype, generator = options.get("dtype") or torch.int64, options.get("generator")
    shape, layout = _shape_and_layout((as_int(n, "randperm: n", ShapeError, least=0),), options)
    (n,) = shape
    with comm.plain():
        torch.randperm(0, dtype=dtype, device="cpu")
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or n - 1 > torch.iinfo(dtype).max:
        _check_holds(n, dtype)
    order = random.permutation(n, random.draw_for(layout.mesh, "randperm", generator)).to(dtype)
    return _own_part(order, layout, options)


@traceable
@constant
def linspace(start: complex | Tensor, end: complex | Tensor, steps: int, **options: Unpack[FactoryOptions]) -> DTensor:
    """`steps` numbers evenly spaced from `start` to `end`, to the bit those of `torch.linspace`.

    `start` and `end` may be DTensors without dims. Each rank makes all numbers and keeps its own.
    """
    return _spaced(torch.linspace, (start, end), steps, options)


@traceable
@constant
def logspace(
    start: complex | Tensor,
    end: complex | Tensor,
    steps: int,
    base: float = 10.0,
    **options: Unpack[FactoryOptions],
) -> DTensor:
    """`steps` powers of `base` whose exponents are evenly spaced from `start` to `end`: those of `torch.logspace`.

    `start` and `end` may be DTensors without dims. Each rank makes all numbers and keeps its own.
    """
    return _spaced(partial(torch.logspace, base=base), (start, end), steps, options)


def _spaced(
    make: Callable[..., Tensor],
    ends: tuple[complex | Tensor, complex | Tensor],
    steps: int,
    options: FactoryOptions,
) -> DTensor:
    _check_options("linspace", options, {"dtype", "requires_grad"})
    shape, layout = _shape_and_layout((as_int(steps, "steps", ShapeError, least=0),), options)
    first, last = (x.item() if isinstance(x, Tensor) else x for x in ends)
    with comm.plain():
        numbers = make(first, last, *shape, dtype=options.get("dtype"))
    return _own_part(numbers, layout, options)


def _own_part(numbers: Tensor, layout: Layout, options: FactoryOptions) -> DTensor:
    """The DTensor of these numbers, of which every rank has all and keeps its own."""

    def local_of_rank(coordinate: Coordinate, device: torch.device) -> Tensor:
        return comm.local_part(numbers, layout, coordinate).to(device)

    return _wrap_local(comm.local_of(layout, local_of_rank), layout, tuple(numbers.shape), options)


def _new(
    make: Callable[..., Tensor],
    size: tuple[Any, ...],
    options: FactoryOptions,
) -> DTensor:
    """A DTensor whose local tensor each rank makes by `make`."""
    size = _size_of(size, options)
    _check_options("a factory", options, {"dtype", "requires_grad"})
    shape, layout = _shape_and_layout(size, options)
    return _wrap_local(_make_local(make, shape, layout, options.get("dtype")), layout, shape, options)


def _make_local(
    make: Callable[..., Tensor], shape: tuple[int, ...], layout: Layout, dtype: torch.dtype | None
) -> Tensor:
    return comm.local_of(
        layout, lambda coordinate, device: make(layout.local_shape(shape, coordinate), dtype=dtype, device=device)
    )


def _random(
    what: str,
    make: Callable[..., Tensor],
    distribution: Callable[[torch.dtype], random.Distribution],
    size: tuple[Any, ...],
    options: FactoryOptions,
) -> DTensor:
    """A DTensor whose local tensor each rank draws itself, once torch has accepted the arguments."""
    size = _size_of(size, options)
    _check_options(what, options, {"dtype", "requires_grad", "generator"})
    dtype, generator = options.get("dtype"), options.get("generator")
    shape, layout = _shape_and_layout(size, options)
    with comm.plain():
        make((0,), dtype=dtype, device="cpu", generator=torch.Generator())
    values = layout.cotangent()
    drawn = _wrap_local(_make_local(torch.empty, shape, values, dtype), values, shape, {})
    random.filled(drawn, distribution, what, generator)
    return _wrap_local(drawn._local_tensor, layout, shape, options)


def _shape_and_layout(size: tuple[object, ...], options: FactoryOptions) -> tuple[tuple[int, ...], Layout]:
    only = size[0] if len(size) == 1 else size
    shape = as_shape((only,) if _is_number(only) else only, "size", ShapeError)
    mesh, placements = as_mesh(options.get("device_mesh")), options.get("placements")
    layout = replicated(mesh) if placements is None else layout_of(mesh, placements, len(shape))
    return shape, layout


def _is_number(size: object) -> bool:
    return is_symbolic(size) or isinstance(size, str) or not isinstance(size, Iterable)


def _size_of(size: tuple[object, ...], options: Any) -> tuple[Any, ...]:
    """The sizes, given by position or as the option `size`, as torch takes them."""
    if "size" not in options:
        return size
    if size:
        raise ArgumentError(f"size={options['size']!r} beside {size}: give the sizes once")
    return (options.pop("size"),)


def _bounds(args: Args, options: Any) -> tuple[list[int], Any]:
    """The bounds and the size of `randint`, by position or by name."""
    values = [*args, *(options.pop(name) for name in ("low", "high", "size") if name in options)]
    if not 2 <= len(values) <= 3:
        raise ArgumentError(f"randint: {len(values)} bounds and sizes, {values}: give randint([low,] high, size)")
    *bounds, size = values
    return [as_int(bound, "randint: a bound") for bound in bounds], size


def _check_options(what: str, options: Mapping[str, object], known: set[str]) -> None:
    """Refuse options that the function does not have, and values of another type."""
    known |= {"device_mesh", "placements"}
    for name in options:
        if name == "layout" and options[name] is torch.strided:
            continue
        if name in ("device", "layout", "pin_memory", "memory_format"):
            raise ArgumentError(f"{what} takes no {name}: a DTensor is strided, and lies on the devices of its mesh")
        if name not in known:
            names = sorted(known)
            raise ArgumentError(f"{what} takes no {name!r}: use {', '.join(names)}{suggestion(name, names)}")
    dtype, generator = options.get("dtype"), options.get("generator")
    if dtype is not None and not isinstance(dtype, torch.dtype) and dtype not in (float, int, bool, complex):
        raise ArgumentError(f"dtype={shown(dtype)}: give a dtype of torch's, such as torch.float32")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentError(f"generator={shown(generator)}: give a torch.Generator, alike on all ranks")


def _check_holds(n: int, dtype: torch.dtype) -> None:
    """Refuse a dtype that does not hold all whole numbers below `n`."""
    if dtype.is_complex or dtype == torch.bool:
        most = 0 if dtype.is_complex else 2
    else:
        most = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max + 1
    if n > most:
        raise DtypeError(f"randperm of {n} as {dtype}, which does not hold all numbers below that: use torch.int64")


def _wrap_local(local: Tensor, layout: Layout, shape: tuple[int, ...], options: FactoryOptions) -> DTensor:
    """Wrap local tensors in `layout`; on partial axes the value is the first rank's term."""
    device = comm.device_of_result(local, layout.mesh)
    wrapped = wrap(local, contiguous_spec(layout.cotangent(), shape, local.dtype, device))
    out = as_dtensor(redistribute(wrapped, layout))
    return out.requires_grad_() if options.get("requires_grad") else out
