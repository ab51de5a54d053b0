"""Operators on batches, independent for each entry of leading dims: pooling, resampling, linear algebra, transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dshard.comm import depending_on
from dshard.core.call import Call, Kernel, LocalOp, Operator, RankCall
from dshard.core.checks import with_meta_form
from dshard.core.signature import Function
from dshard.ops.views import with_local_size
from dshard.rules.rule import Rule, linear
from dshard.torch_private import OpOverload


def leading(count: Callable[[int], int], passes: tuple[int, ...] = ()) -> Callable[[Call], Rule]:
    """The rule of an operator whose first `count(ndim)` dims all tensors share; if they differ, none may be sharded.

    A partial sum passes through the operands `passes`, but for one of whole numbers, whose means are rounded.
    """

    def rule(call: Call) -> Rule:
        """Leading dims may be sharded; those on which it works may not."""
        first = call.shapes[0]
        n = count(len(first))
        shared = all(shape[:n] == first[:n] for shape in (*call.shapes, *call.out_shapes))
        batch = " ".join(f"b{i}" for i in range(n if shared else 0))
        rounds = not (call.specs[0].dtype.is_floating_point or call.specs[0].dtype.is_complex)
        partials = () if rounds else (i for i in passes if i < len(call.specs))
        return call.rule(f"*{batch} [...] -> *{batch} [...]", passes=linear(*partials))

    return rule


def transformed(call: Call) -> Rule:
    """Any dim may be sharded except those that are transformed."""
    return call.rule("... [] ... -> ... [] ...", at="dim", passes=linear(0))


def none_sharded(call: Call) -> Rule:
    """No dim may be sharded: every rank does all of it."""
    return call.rule("*[...] -> *[...]")


def or_nothing(kernel: Kernel | None = None) -> Kernel:
    """The operator, or empty results on a rank without entries, for which torch may refuse to run it."""

    def choose(call: RankCall) -> LocalOp:
        sizes = (zip(shape, call.local_shape(i), strict=True) for i, shape in enumerate(call.shapes))
        if any(n > 0 and not here for shape in sizes for n, here in shape):
            return _nothing(call)
        return with_meta_form(call.func) if kernel is None else kernel(call)

    return choose


def _nothing(call: RankCall) -> LocalOp:
    shapes = [call.out_local_shape(i) for i in range(len(call.outs))]
    mask = call.argument("output_mask")

    def make(*args: object, **kwargs: object) -> Any:
        operands = [arg for arg in args if isinstance(arg, Tensor)]
        zeros = [operands[0].new_zeros(shape, dtype=out.dtype) for shape, out in zip(shapes, call.outs, strict=True)]
        empty = [depending_on(x, operands) for x in zeros]
        if mask is not None:
            missing = [i for i, is_needed in enumerate(mask) if not is_needed][: len(mask) - len(empty)]
            rest = iter(empty)  # not all that is not wanted is left out
            return tuple([None if i in missing else next(rest) for i in range(len(mask))])
        return empty[0] if len(empty) == 1 else tuple(empty)

    return make


def in_memory_like(call: RankCall) -> LocalOp:
    """The operator on a local matrix that is contiguous if and only if the global tensor is.

    torch factors the transpose of a contiguous matrix, and its backward tells which it was by the strides.
    """
    is_contiguous = call.specs[0].meta().is_contiguous()

    def local(matrix: Tensor, *rest: object, **options: object) -> Any:
        if matrix.is_contiguous() != is_contiguous:
            matrix = matrix.contiguous() if is_contiguous else matrix.mT.contiguous().mT
        return call.func(matrix, *rest, **options)

    return local


def but(trailing: int) -> Callable[[int], int]:
    """A count of the leading dims: all but the last `n`."""
    return lambda ndim: ndim - trailing


def _one(ndim: int) -> int:
    return 1


def _without_batch(func: OpOverload) -> Function:
    """The meta form of an operator of which torch's refuses a batch of no entries."""

    def run(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if x.shape[0]:
            return func(x, *args, **kwargs)  # type: ignore[no-any-return]
        return func(x.new_empty((1, *x.shape[1:])), *args, **kwargs)[:0]  # type: ignore[no-any-return]

    return run


META = {
    func: _without_batch(func)
    for n in (1, 2, 3)
    for func in (
        getattr(torch.ops.aten, f"upsample_nearest{n}d").default,
        getattr(torch.ops.aten, f"_upsample_nearest_exact{n}d").default,
    )
}
"""Meta forms of operators that stand in for torch's own."""


def _pooling(n: int) -> dict[str, Operator]:
    """Operators over `n` spatial dims, and their backward forms."""
    plain = [f"reflection_pad{n}d", f"replication_pad{n}d"]
    chosen = []
    if n > 1:  # torch does the others as ones over two dims
        plain += [f"avg_pool{n}d", f"_adaptive_avg_pool{n}d"]
        chosen = [f"max_pool{n}d_with_indices", f"adaptive_max_pool{n}d"]
        chosen += ["fractional_max_pool2d"] if n == 2 else []
    modes = {1: ["linear1d"], 2: ["bilinear2d", "bicubic2d"], 3: ["trilinear3d"]}[n]
    sized = [f"upsample_{mode}" for mode in (f"nearest{n}d", *modes)] + [f"_upsample_nearest_exact{n}d"]
    sized += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"] if n == 2 else []
    forward = Operator(leading(but(n), (0,)), or_nothing())
    table = {f"aten::{name}": forward for name in (*plain, *sized)}
    table |= {f"aten::{name}_backward": forward for name in plain}
    table |= {f"aten::{name}": Operator(leading(but(n)), or_nothing()) for name in chosen}
    checked = [f"aten::{name}" for name in (*sized, f"_adaptive_avg_pool{n}d", f"adaptive_max_pool{n}d")]
    table |= {name: replace(table[name], refuses_empty=True) for name in checked if name in table}
    table |= {f"aten::{name}_backward": forward for name in chosen}
    backward = Operator(leading(but(n), (0,)), or_nothing(with_local_size("input_size")))
    return table | {f"aten::{name}_backward": backward for name in sized}


_MATRICES = (
    "_linalg_eigh",
    "_linalg_eigvals",
    "_linalg_svd",
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "linalg_cholesky_ex",
    "linalg_eig",
    "linalg_householder_product",
    "linalg_inv_ex",
    "linalg_ldl_factor_ex",
    "linalg_ldl_solve",
    "linalg_lu",
    "linalg_lu_factor_ex",
    "linalg_lu_solve",
    "linalg_matrix_exp",
    "linalg_qr",
    "linalg_solve_triangular",
    "lu_unpack",
    "ormqr",
    "triangular_solve",
)
_FACTORED = ("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex")
"""Operators on matrices whose backward pass uses the factors."""

RULES: dict[str, Operator] = {
    **_pooling(1),
    **_pooling(2),
    **_pooling(3),
    **{f"aten::{name}": Operator(leading(but(2)), or_nothing()) for name in _MATRICES},
    **{f"aten::{name}": Operator(leading(but(2)), or_nothing(in_memory_like)) for name in _FACTORED},
    **{f"aten::_fft_{name}": Operator(transformed, or_nothing()) for name in ("c2c", "r2c", "c2r")},
    **{f"aten::grid_sampler_{n}d": Operator(leading(_one, (0,)), or_nothing()) for n in (2, 3)},
    **{f"aten::grid_sampler_{n}d_backward": Operator(leading(_one, (0,)), or_nothing()) for n in (2, 3)},
    "aten::_linalg_check_errors": Operator(none_sharded),
}
