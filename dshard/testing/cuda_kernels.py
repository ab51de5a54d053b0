"""torch's CUDA kernels of attention on CPU tensors, with CUDA's conventions, without a GPU.

    with dshard.testing.cuda_contract():
        ...

Within the block CPU tensors take the branches of dshard that CUDA tensors take, and the kernels that are called there
run as matmuls which round where the kernels do. What differs between devices is as on CUDA: a causal mask's corner, the
memory that is read as contiguous whatever its strides, padding, dtypes, forms of the results, and what is refused. Each
convention has its source in torch's `aten/src/ATen/native/transformers/cuda`, named in `CONVENTIONS`.

What it does not do: dropout, nested tensors, torch's own choice of a kernel, or the speed of a GPU.

Design: docs/design/0022-kernels-of-cuda.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, nan, prod
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.comm import EMULATED, HALF, kernel_device


class Convention(NamedTuple):
    """Something that a kernel of CUDA takes for granted, or refuses, and where torch's source says so."""

    rule: str
    source: str


CONVENTIONS = {
    "corner": Convention(
        "flash aligns is_causal at the lower right of the scores; a row that sees no key is zero, its log-sum-exp inf",
        "flash_attn/mask.h, softmax.h",
    ),
    "upper left": Convention("efficient aligns is_causal at the upper left", "attention.cu: CausalFromTopLeft"),
    "log-sum-exp of flash": Convention(
        "the backward kernel reads (batch, heads, queries) as contiguous memory from the data pointer",
        "flash_attn/flash_bwd_kernel.h",
    ),
    "log-sum-exp of efficient": Convention(
        "rows are padded with inf to a multiple of 32, and the backward kernel reads the padding; strides of all dims "
        "but the last are heeded, and are multiples of 8",
        "attention.cu: kAlignLSE, mem_eff_attention/kernel_backward.h",
    ),
    "result of efficient": Convention(
        "the backward kernel in half precision reads the result with rows of all heads: a row's stride is heads x size",
        "mem_eff_attention/kernel_backward.h: o_strideM",
    ),
    "dtype": Convention("flash takes float16 and bfloat16; efficient float32, too", "flash_attn/flash_api.cpp"),
    "size": Convention("flash takes one size of heads, a multiple of 8, at most 256", "flash_attn/flash_api.cpp"),
    "last dim": Convention("elements of the last dim are contiguous", "flash_attn/flash_api.cpp, attention.cu"),
    "alignment": Convention(
        "rows, heads and entries of the batch begin at multiples of 16 bytes", "mem_eff_attention/kernel_forward.h"
    ),
    "heads": Convention("efficient takes as many key heads as query heads, flash a divisor", "attention.cu"),
    "shapes": Convention("operands fit each other, and none is empty", "flash_attn/flash_api.cpp, attention.cu"),
    "unsupported": Convention("the contract has no dropout and no debug mask", "dshard"),
}
"""What the emulated kernels heed, by name."""


@contextmanager
def cuda_contract() -> Iterator[None]:
    """Within the block CPU tensors take the branches of CUDA tensors, whose kernels of attention are emulated.

    >>> import torch
    >>> flash = torch.ops.aten._scaled_dot_product_flash_attention
    >>> with cuda_contract():
    ...     out = flash(*(torch.ones(1, 1, n, 8).half() for n in (3, 2, 2)), is_causal=True)[0]
    >>> out[0, 0, :, 0]  # the first of three queries sees none of two keys
    tensor([0., 1., 1.], dtype=torch.float16)
    """
    _register()
    before = dict(EMULATED)
    EMULATED["cpu"] = "cuda"
    try:
        yield
    finally:
        EMULATED.clear()
        EMULATED.update(before)


def refuse(name: str, found: object) -> NoReturn:
    """Raise the error of a convention that a call does not keep, as torch does: a RuntimeError."""
    rule, source = CONVENTIONS[name]
    raise RuntimeError(f"CUDA's kernels: {name}: {rule} ({source}); found {found}")


# -- the kernels


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    _check_flash(q, k, v, dropout or debug)
    seen = _seen(q, k, k.shape[-2] - q.shape[-2]) if causal else None
    all_k, all_v = _with_heads(q.shape[1], k, v)
    out, lse = _forward(q, all_k, all_v, None, seen, _scale(q, scale))
    state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)
    lengths = q.shape[-2], k.shape[-2]
    return _rows_of_all_heads(out.to(q.dtype)), lse, None, None, *lengths, state, unused, q.new_empty(0)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    cum_q, _, _, _, dropout, causal, *_ = rest
    _check_flash(q, k, v, dropout or cum_q is not None)
    _check_gradient(grad, q, v, out, lse)
    lse = _memory(lse, tuple(q.shape[:3]))
    seen = _seen(q, k, k.shape[-2] - q.shape[-2]) if causal else None
    heads, key_heads = q.shape[1], k.shape[1]
    all_k, all_v = _with_heads(heads, k, v)
    scores = _scores(q, all_k, None, seen, _scale(q, scale))
    of_q, of_k, of_v, _ = _backward(grad, q, all_k, all_v, scores, _scale(q, scale), out, lse)
    of_k, of_v = (x.unflatten(1, (key_heads, heads // key_heads)).sum(2) for x in (of_k, of_v))
    return tuple(_rows_of_all_heads(x.to(q.dtype)) for x in (of_q, of_k, of_v))


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    with_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _check_efficient(q, k, v, bias, dropout)
    seen = _seen(q, k, 0) if causal else None
    out, lse = _forward(q, k, v, bias, seen, _scale(q, scale))
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=inf) if with_lse else lse[..., :0]
    seed, offset = (q.new_zeros((), dtype=torch.int64) for _ in range(2))
    return _rows_of_all_heads(out.to(q.dtype)), lse.contiguous(), seed, offset


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    _, _, dropout, needed, *causal = rest
    _check_efficient(q, k, v, bias, dropout)
    _check_gradient(grad, q, v, out, lse)
    batch, heads, queries = q.shape[:3]
    if any(lse.shape[i] > 1 and lse.stride(i) % 8 for i in (0, 1)):
        refuse("log-sum-exp of efficient", f"strides {lse.stride()}")
    padded = queries + -queries % 32
    lse = _memory(lse, (batch, heads, padded), (lse.stride(0), lse.stride(1), 1))
    if q.dtype in HALF:
        size = out.shape[-1]
        out = _memory(out, tuple(out.shape), (out.stride(0), out.stride(1), heads * size, 1))
    longer = (0, 0, 0, padded - queries)  # rows that are read as zeros, but for their log-sum-exps
    grad, of_rows, out = (F.pad(x, longer) for x in (grad, q, out))
    if bias is not None:
        bias = F.pad(bias, longer)
    seen = _seen(of_rows, k, 0) if any(causal) else None
    scores = _scores(of_rows, k, bias, seen, _scale(q, scale))
    found = _backward(grad, of_rows, k, v, scores, _scale(q, scale), out, lse)
    *gradients, of_bias = found[0][:, :, :queries], found[1], found[2], found[3][:, :, :queries]
    results = (*map(_rows_of_all_heads, gradients), of_bias)
    return tuple(x.to(q.dtype) if is_needed else None for x, is_needed in zip(results, needed, strict=True))


# -- what both compute


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The result in single precision, and the log-sum-exp of each row, inf where it sees no key."""
    scores = _scores(q, k, bias, seen, scale)
    most = scores.amax(-1, keepdim=True)
    weights = (scores - most.masked_fill(most == -inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = _rounded(weights, q) @ v.float() / total.masked_fill(total == 0, 1.0)
    lse = (most + total.log()).squeeze(-1)
    return out, lse.masked_fill(lse == -inf, inf)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, scale: float, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and scores in single precision."""
    weights = (scores - lse.unsqueeze(-1)).exp()
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    of_scores = weights * (grad.float() @ v.float().mT - delta)
    of_v = _rounded(weights, q).mT @ grad.float()
    rounded = _rounded(of_scores, q)
    return rounded @ k.float() * scale, rounded.mT @ q.float() * scale, of_v, of_scores


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, seen: Tensor | None, scale: float) -> Tensor:
    scores = q.float() @ k.float().mT * scale
    if bias is not None:
        scores = scores + bias.float()
    return scores if seen is None else scores.masked_fill(seen.logical_not(), -inf)


def _seen(q: Tensor, k: Tensor, diagonal: int) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal)


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    """Weights as the tensor cores take them: in the dtype of the operands."""
    return x.to(like.dtype).float()


def _with_heads(heads: int, *tensors: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(heads // x.shape[1], 1) for x in tensors]


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


# -- memory, as the kernels see it


def _rows_of_all_heads(x: Tensor) -> Tensor:
    """`x` in memory of the dims batch, rows, heads, size, which kernels of CUDA write."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _memory(x: Tensor, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Tensor:
    """The elements that a kernel reads from the data pointer of `x` by these strides, NaN beyond its memory."""
    strides = stride or tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    here = int(x.untyped_storage().nbytes()) // x.itemsize - int(x.storage_offset())
    flat = F.pad(x.detach().as_strided((min(here, last + 1),), (1,)), (0, max(last + 1 - here, 0)), value=nan)
    return flat.as_strided(shape, strides)


# -- what they refuse


def _check_flash(q: Tensor, k: Tensor, v: Tensor, unsupported: object) -> None:
    _check_operands(q, k, v, unsupported)
    if q.dtype not in HALF:
        refuse("dtype", q.dtype)
    if not q.shape[-1] == v.shape[-1] <= 256 or q.shape[-1] % 8:
        refuse("size", (q.shape[-1], v.shape[-1]))
    if q.shape[1] % k.shape[1]:
        refuse("heads", (q.shape[1], k.shape[1]))


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: object) -> None:
    _check_operands(q, k, v, dropout)
    if q.dtype not in HALF | {torch.float32}:
        refuse("dtype", q.dtype)
    if q.shape[1] != k.shape[1]:
        refuse("heads", (q.shape[1], k.shape[1]))
    if bias is not None:
        if tuple(bias.shape) != (*q.shape[:3], k.shape[-2]) or bias.dtype != q.dtype:
            refuse("shapes", f"a bias of {tuple(bias.shape)}, {bias.dtype}")
        _check_memory(bias)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, unsupported: object) -> None:
    if kernel_device(q.device) != "cuda":
        raise NotImplementedError("this kernel of CUDA runs on CPU tensors within dshard.testing.cuda_contract() alone")
    if unsupported:
        refuse("unsupported", unsupported)
    batch, heads, keys = k.shape[:3]
    fits = k.shape == (q.shape[0], heads, keys, q.shape[-1]) and v.shape[:-1] == (batch, heads, keys)
    if q.dim() != 4 or not fits or not q.dtype == k.dtype == v.dtype or not all(x.numel() for x in (q, k, v)):
        refuse("shapes", [(tuple(x.shape), x.dtype) for x in (q, k, v)])
    for x in (q, k, v):
        _check_memory(x)


def _check_gradient(grad: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    shape = (*q.shape[:3], v.shape[-1])
    if not grad.shape == out.shape == shape or not grad.dtype == out.dtype == q.dtype:
        refuse("shapes", [(tuple(x.shape), x.dtype) for x in (grad, out)])
    if lse.dtype != torch.float32 or lse.dim() != 3:
        refuse("shapes", f"log-sum-exps of {tuple(lse.shape)}, {lse.dtype}")
    if out.stride(-1) != 1:
        refuse("last dim", out.stride())


def _check_memory(x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        refuse("last dim", x.stride())
    steps = [step for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    if any(n % 16 for n in (x.data_ptr(), *(step * x.itemsize for step in steps))):
        refuse("alignment", f"an offset of {x.storage_offset()} and strides {x.stride()} of {x.dtype}")


_KERNELS: dict[str, Callable[..., object]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}


_LIBRARIES: list[torch.library.Library] = []
"""Holds the library of the kernels, which end with it."""


def _register() -> None:
    """Give these operators of torch kernels for CPU tensors, once."""
    if not _LIBRARIES:
        _LIBRARIES.append(library := torch.library.Library("aten", "IMPL"))
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU")
