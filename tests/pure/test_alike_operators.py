"""Operators without data that are alike give tensors of the same shapes, and run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dshard.core.alike_operators import AlikeOperators
from dshard.core.observe import OperatorMode


def meta(*shape: int, dtype: torch.dtype = torch.float32, order: tuple[int, ...] | None = None) -> Tensor:
    x = torch.empty(*shape, dtype=dtype, device="meta")
    return x if order is None else x.permute(order)


CASES: dict[str, Callable[[], Any]] = {
    "sum": lambda: meta(3, 4) + 1,
    "sum of another number's type": lambda: meta(3, 4, dtype=torch.int64) * 1.0,
    "the same number's type": lambda: meta(3, 4, dtype=torch.int64) * 1,
    "product": lambda: meta(3, 4) @ meta(4, 5),
    "permuted": lambda: meta(3, 4, 5, order=(2, 0, 1)).exp(),
    "several": lambda: meta(6, 4).topk(2),
    "list": lambda: torch.ops.aten.split_with_sizes_copy(meta(6, 4), [2, 4]),
    "of tensors": lambda: torch.cat([meta(3, 4), meta(2, 4)]),
    "backward": lambda: torch.ops.aten.native_layer_norm_backward(
        meta(3, 4), meta(3, 4), [4], meta(3, 1), meta(3, 1), meta(4), None, [True, True, False]
    ),
    "view": lambda: meta(3, 4).t(),
    "no change": lambda: meta(3, 4).contiguous(),
    "write": lambda: meta(3, 4).add_(1),
    "complex": lambda: meta(3, 4, dtype=torch.complex64).conj().exp(),
    "made": lambda: torch.full((2, 3), 1, device="meta"),
}


def forms(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.untyped_storage().nbytes()
    return [type(x), *map(forms, x)] if isinstance(x, list | tuple) else x


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_alike_operators_give_what_torch_gives(default: torch.dtype) -> None:
    alike, before = AlikeOperators[None](), torch.get_default_dtype()

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return alike.run(func, func, args, kwargs)[1]

    try:
        for dtype in (torch.float32, default):
            torch.set_default_dtype(dtype)
            for name, case in CASES.items():
                expected = forms(case())
                with OperatorMode(run):
                    assert [forms(case()) for _ in range(3)] == [expected] * 3, name
    finally:
        torch.set_default_dtype(before)


def test_alike_operators_run_once_and_give_tensors_of_their_own() -> None:
    alike, runs = AlikeOperators[None](), list[object]()
    x, func = meta(3, 4), torch.ops.aten.exp.default

    def exp(*args: Any) -> Any:
        runs.append(args)
        return func(*args)

    outs = [alike.run(func, exp, (x,), {})[1] for _ in range(3)]

    assert len(runs) == 1
    assert len({out.untyped_storage()._cdata for out in outs}) == len({id(out) for out in outs}) == 3


def test_operators_with_data_that_write_or_view_have_no_key() -> None:
    alike, aten = AlikeOperators[None](), torch.ops.aten

    def key(func: Any, *args: Any) -> Any:
        return alike.run(func, func, args, {})[0]

    assert key(aten.exp.default, torch.ones(2)) is None
    assert key(aten.add.Tensor, meta(2), torch.ones(())) is None
    assert key(aten.exp_.default, meta(2)) is None
    assert key(aten.t.default, meta(2, 2)) is None
    assert key(aten.exp.default, meta(2)) is not None
    one, other = (key(aten.mul.Tensor, meta(2, dtype=torch.int64), n) for n in (1, 1.0))
    assert one != other
