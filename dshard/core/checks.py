"""Arguments that torch refuses on one device are refused before anything is sent.

torch's functions for meta tensors do not check all that its kernels refuse; the tables of operators add to them the
checks below.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from dshard.comm import plain, with_form
from dshard.core.call import Check, arguments_by_name, writes_first
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import for_shapes
from dshard.core.torch_function import binding_of
from dshard.core.trees import replace_leaves, replace_tensors
from dshard.errors import LayoutError
from dshard.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    UnsupportedOperatorException,
    has_internal_overlap,
)

UNKNOWN = (
    NotImplementedError,
    DynamicOutputShapeException,
    DataDependentOutputException,
    UnsupportedOperatorException,
)
"""Errors by which torch says that it cannot infer an output without data."""


def infer(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The result of `func` on meta tensors. Raises torch's own errors."""
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    with plain(), for_shapes(), _runtime_errors():
        _refuse_more(func, args, kwargs)
        return META.get(func, func)(*args, **kwargs)


def accept(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Raise torch's own error for these arguments, on meta tensors, where torch raises one without data."""
    with for_shapes():
        _refuse_more(func, args, kwargs)
    if func in META:
        return
    with plain(), for_shapes(), FakeTensorMode(), suppress(*UNKNOWN), _without_log(), _runtime_errors():
        fakes: dict[int, Tensor] = {}
        fake_args, fake_kwargs = replace_leaves((args, kwargs), lambda leaf: _fake_of(leaf, fakes))
        func(*fake_args, **fake_kwargs)


def _fake_of(leaf: object, fakes: dict[int, Tensor]) -> Any:
    """The fake tensor that stands for a meta tensor: always the same one."""
    if not isinstance(leaf, Tensor):
        return leaf
    if id(leaf) not in fakes:
        fakes[id(leaf)] = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return fakes[id(leaf)]


@contextmanager
def _runtime_errors() -> Iterator[None]:
    """Turn an AssertionError within the block into a RuntimeError."""
    try:
        yield  # torch's Python forms assert what its kernels refuse with a RuntimeError
    except AssertionError as error:
        raise RuntimeError(str(error)) from error


@contextmanager
def _without_log() -> Iterator[None]:
    """Silence the logger by which torch also reports the errors that it raises."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# -- checks that torch's functions for meta tensors leave out


def refusing() -> OperatorMode:
    """A mode in which operators on meta tensors refuse what torch's kernels refuse, as far as `CHECKS` says."""

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        _refuse_more(func, args, kwargs)
        return META.get(func, func)(*args, **kwargs)

    return OperatorMode(run)


QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""The dtypes whose tensors have a quantizer, of which torch knows nothing without data."""


def _refuse_more(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    first, name = args[0] if args else None, func._schema.name.removesuffix("_")
    quantized = next((arg for arg in (*args, *kwargs.values()) if type(arg) is torch.dtype and arg in QUANTIZED), None)
    if quantized is not None:
        raise LayoutError(
            f"{func} gives a tensor of {quantized}: a distributed tensor is of no quantized dtype; call it on "
            "x.full_tensor(), or on the local parts; to train for it, use torch.fake_quantize_per_tensor_affine"
        )
    if isinstance(first, Tensor) and _writes_each(func):
        _require(has_internal_overlap(first) != 1, _OVERLAPS)
    check = CHECKS.get(name)
    if check is not None:
        defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        check(defaults | arguments_by_name(func, args, kwargs))
    if name in REFUSES_EMPTY and isinstance(first, Tensor) and not first.numel():
        _refuse_by_kernel(func, args, kwargs)


def _refuse_by_kernel(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Let torch's kernel refuse a call whose first operand has no elements: it has then nothing to compute."""

    def zeros(x: Tensor) -> Tensor:
        if not x.numel():
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")
        return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)  # of no memory, whatever its size

    with plain(), suppress(NotImplementedError):  # of a dtype that the kernels of CPUs lack
        func(*replace_tensors(args, zeros), **replace_tensors(kwargs, zeros))


def _writes_each(func: OpOverload) -> bool:
    """Whether the operator writes each element of its first operand separately, so that none may share memory."""
    return writes_first(func) and torch.Tag.inplace_view not in func.tags and func not in _IDEMPOTENT


_ATEN = torch.ops.aten
_IDEMPOTENT = frozenset(
    {
        _ATEN.zero_.default,
        _ATEN.fill_.Scalar,
        _ATEN.masked_fill_.Scalar,
        _ATEN.masked_fill_.Tensor,
        _ATEN.index_fill_.int_Scalar,
        _ATEN.index_fill_.int_Tensor,
        _ATEN.index_put_.default,
        _ATEN.tril_.default,
        _ATEN.triu_.default,
    }
)
"""In-place operators that torch's kernels let write to an expanded tensor."""
_OVERLAPS = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def _require(holds: bool, message: str) -> None:
    """Raise a RuntimeError, as torch's kernels do, unless `holds`."""
    if not holds:
        raise RuntimeError(message)


def check_scatter(arguments: Kwargs) -> None:
    x, index, source = arguments["self"], arguments["index"], arguments.get("src")
    is_index = index.dtype in (torch.int64, torch.int32) or not index.numel()
    _require(is_index, f"scatter(): Expected dtype int32/int64 for index, got {index.dtype}")
    others = [x] if source is None else [x, source]
    expected = "scatter(): Expected self.dtype to be equal to src.dtype"
    _require(others[-1].dtype == x.dtype, f"{expected}, got {x.dtype}")
    if index.numel() == 0:
        return
    same_ndim = all(max(t.dim(), 1) == max(index.dim(), 1) for t in others)
    _require(same_ndim, "Index tensor must have the same number of dimensions as self tensor and src tensor")
    dim = arguments["dim"] % max(x.dim(), 1)
    fits = all(n <= x.shape[i] for i, n in enumerate(index.shape) if i != dim and x.dim())
    text = f"Expected index {tuple(index.shape)} to be no larger than self {tuple(x.shape)} apart from dimension {dim}"
    if source is not None:
        fits = fits and all(n <= m for n, m in zip(index.shape, source.shape, strict=False))
        text += f" and to be no larger size than src {tuple(source.shape)}"
    _require(fits, text)


def check_index_add(arguments: Kwargs) -> None:
    x, index, source, dim = arguments["self"], arguments["index"], arguments["source"], arguments["dim"]
    same_dtype = x.dtype == source.dtype
    _require(same_dtype, f"index_add_(): self ({x.dtype}) and source ({source.dtype}) must have the same scalar type")
    n, length = index.numel(), source.shape[dim] if source.dim() else 1
    _require(n == length, f"index_add_(): Number of indices ({n}) should be equal to source.size(dim): ({length})")
    same_ndim = x.dim() == source.dim() or not x.dim() or not source.dim()
    _require(same_ndim, f"index_add_(): Source ({source.dim()}D) and self ({x.dim()}D) must have as many dims")
    if x.dim() == source.dim() > 0:
        shapes = ([n for i, n in enumerate(t.shape) if i != dim % x.dim()] for t in (x, source))
        _require(
            next(shapes) == next(shapes),
            "source tensor shape must match self tensor shape, excluding the specified dimension",
        )


def check_index_select(arguments: Kwargs) -> None:
    if arguments["index"].dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")


def check_nll_loss(arguments: Kwargs) -> None:
    x, target = arguments["self"], arguments["target"]
    if target.numel() and x.dim() and not x.shape[min(1, x.dim() - 1)]:  # a rank that has no target would not see it
        raise IndexError("Target 0 is out of bounds.")  # even if all are ignored, which only their values tell


def check_masked_scatter(arguments: Kwargs) -> None:
    dtype = arguments["mask"].dtype
    _require(dtype == torch.bool, f"masked_scatter_ only supports boolean masks, but got mask with dtype {dtype}")


def check_multinomial(arguments: Kwargs) -> None:
    x, n = arguments["self"], arguments["num_samples"]
    classes = x.shape[-1] if x.dim() else 1
    _require(x.is_floating_point(), f"multinomial only supports floating-point dtypes, got {x.dtype}")
    _require(n > 0, "cannot sample n_sample <= 0 samples")
    _require(classes <= 2**24, "number of categories cannot exceed 2^24")
    _same_out(arguments.get("out"), torch.int64)
    enough = arguments["replacement"] or not x.dim() or n <= classes
    _require(enough, "cannot sample n_sample > prob_dist.size(-1) samples without replacement")


def check_convolution(arguments: Kwargs) -> None:
    x, weight, channels = arguments["input"], arguments["weight"], 1 if arguments["transposed"] else 0
    has_channels = weight.shape[0] > 0 and weight.shape[channels] > 0
    _require(has_channels, f"convolution: a weight of shape {tuple(weight.shape)} has no output channels")
    _require(0 not in weight.shape[2:], f"convolution: a weight of shape {tuple(weight.shape)} has no positions")
    only_channels_or_batch = x.numel() > 0 or 0 in x.shape[:2]
    _require(only_channels_or_batch, f"convolution: an input of shape {tuple(x.shape)} has no positions")
    for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
        fits = all(n >= least for n in arguments[name])
        _require(fits, f"convolution: {name} {tuple(arguments[name])} is not supported: too small")


def check_lstsq(arguments: Kwargs) -> None:
    _require(arguments["self"].dim() >= 2, "torch.linalg.lstsq: input must have at least 2 dimensions.")
    _require(arguments["b"].dim() >= 1, "torch.linalg.lstsq: other must have at least 1 dimension.")


def check_narrow_copy(arguments: Kwargs) -> None:
    x, dim = arguments["self"], arguments["dim"]
    _require(dim < x.dim(), f"narrow_copy: dim {dim} of a tensor of {x.dim()} dims")


def check_strided_scatter(arguments: Kwargs) -> None:
    x, steps = arguments["self"], zip(arguments["size"], arguments["stride"], strict=False)
    last = (arguments["storage_offset"] or 0) + sum((n - 1) * step for n, step in steps)
    fits = last < x.numel() or 0 in arguments["size"]
    _require(fits, f"as_strided_scatter: element {last} is out of bounds for storage of {x.numel()} elements")


def check_cat(arguments: Kwargs) -> None:
    for i, x in enumerate(arguments["tensors"]):
        _require(x.dim() > 0, f"zero-dimensional tensor (at position {i}) cannot be concatenated")


def check_complex(arguments: Kwargs) -> None:
    _same_out(arguments.get("out"), arguments["real"].dtype.to_complex())


def check_aminmax(arguments: Kwargs) -> None:
    for name in ("min", "max"):
        _same_out(arguments.get(name), arguments["self"].dtype)


def check_dim(arguments: Kwargs) -> None:
    ndim, dim = max(arguments["self"].dim(), 1), arguments["dim"]
    if not -ndim <= dim < ndim:
        bounds = f"expected to be in range of [{-ndim}, {ndim - 1}], but got {dim}"
        raise IndexError(f"Dimension out of range ({bounds})")


def _same_out(out: Tensor | None, dtype: torch.dtype) -> None:
    _require(out is None or out.dtype == dtype, f"Expected out tensor to have dtype {dtype}")


def _histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return x.new_empty((bins,))


def _fake_quantized(x: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: list[int], target_lengths: list[int], *options: object
) -> tuple[Tensor, Tensor]:
    batch = log_probs.shape[1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, log_probs.shape[0], 2 * max(target_lengths) + 1)


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *operands: object) -> Tensor:
    return torch.empty_like(log_probs)


META: dict[OpOverload, Function] = {
    _ATEN._ctc_loss.default: _ctc_loss,
    _ATEN._ctc_loss_backward.default: _ctc_loss_backward,
    _ATEN.histc.default: _histogram,
    _ATEN.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantized,
    _ATEN.fake_quantize_per_channel_affine_cachemask.default: _fake_quantized,
    _ATEN._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _fake_quantized,
}
"""Meta forms of operators that have none in torch, or one that refuses what their kernels on some device take."""


def with_meta_form(func: OpOverload) -> Function:
    """The operator as it runs on local tensors, with or without data."""
    form = META.get(func)
    run = binding_of(func)
    return run if form is None else with_form(run, form)


CHECKS: dict[str, Check] = {}
"""The checks of operators by their names, from the tables of operators."""
REFUSES_EMPTY: set[str] = set()
"""The operators whose kernels refuse a first operand without elements in some calls, by name, from the same tables."""
