"""Arguments of sizes that do not divide, for every registered operator; a new row in a table needs a sample here.

A backward operator is covered by the sample of its forward one: see `dshard.testing.check.recorded_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.batched_samples import BATCHED

Sample: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
aten: Any = torch.ops.aten
_GENERATOR = torch.Generator().manual_seed(0)


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_GENERATOR)


def chances(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_GENERATOR) * 0.8 + 0.1


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_GENERATOR)


def truths(*shape: int) -> Tensor:
    return ids(2, *shape).bool()


def distinct(*shape: int) -> Tensor:
    """Return distinct whole numbers, which stay exact as partials, so that backward passes can compare them again."""
    return torch.randperm(prod(shape), generator=_GENERATOR).double().view(shape)


x, y, row, column = reals(5, 3), reals(5, 3), reals(3), reals(5, 1)
cube = reals(5, 2, 3)
mask = truths(5, 3)
frames, sizes = reals(7, 5, 4).log_softmax(-1), torch.tensor([2, 0, 3, 1, 3])
listed = torch.tensor([[0, 2, -1], [1, -1, 1], [-1, 0, 0], [2, 0, 1], [0, -1, 2]])

COPIES: dict[str, Sample] = {
    "clone": (aten.clone.default, (x,)),
    "detach": (aten.detach.default, (x,)),
    "alias": (aten.alias.default, (x,)),
    "lift_fresh": (aten.lift_fresh.default, (x,)),
    "positive": (torch.positive, (x,)),
    "positive op": (aten.positive.default, (x,)),
    "copy": (aten.copy.default, (x, row)),
    "copy_": (aten.copy_.default, (x, y)),
    "copy_ cast": (aten.copy_.default, (x, ids(9, 5, 3).float())),
    "to": (aten._to_copy.default, (x, {"dtype": torch.float32})),
    "to int": (aten._to_copy.default, (x * 9, {"dtype": torch.int32})),
    "to double": (aten._to_copy.default, (ids(9, 5, 3).float(), {"dtype": torch.float64})),
    "fill": (aten.fill.Scalar, (x, 2.5)),
    "fill_": (aten.fill_.Scalar, (x, 2.5)),
    "zero": (aten.zero.default, (x,)),
    "zero_": (aten.zero_.default, (x,)),
    "masked_fill": (aten.masked_fill.Scalar, (x, mask, 1.5)),
    "masked_fill tensor": (torch.masked_fill, (x, truths(3), torch.tensor(1.5, dtype=torch.float64))),
    "masked_fill_": (aten.masked_fill_.Scalar, (x, mask, 1.5)),
    "nan_to_num": (torch.nan_to_num, (torch.where(mask, torch.nan, x),)),
}

POINTWISE: dict[str, Sample] = {
    "add": (torch.add, (x, row)),
    "add alpha": (torch.add, (x, y, {"alpha": 0.5})),
    "add number": (torch.add, (x, 2.0)),
    "add_": (aten.add_.Tensor, (x, row)),
    "add scalar tensor": (torch.add, (x, reals())),
    "sub": (torch.sub, (x, column)),
    "rsub": (torch.rsub, (x, y)),
    "mul": (torch.mul, (x, row)),
    "mul number": (torch.mul, (x, 3)),
    "mul_": (aten.mul_.Tensor, (x, y)),
    "div": (torch.div, (x, row)),
    "div number": (torch.div, (x, 4.0)),
    "div rounded": (torch.div, (x, y, {"rounding_mode": "floor"})),
    "neg": (torch.neg, (x,)),
    "pow": (torch.pow, (chances(5, 3), y)),
    "pow number": (torch.pow, (x, 2)),
    "relu": (F.relu, (x,)),
    "gelu": (F.gelu, (x,)),
    "gelu tanh": (F.gelu, (x, {"approximate": "tanh"})),
    "silu": (F.silu, (x,)),
    "tanh": (torch.tanh, (x,)),
    "sigmoid": (torch.sigmoid, (x,)),
    "exp": (torch.exp, (x,)),
    "log": (torch.log, (chances(5, 3),)),
    "sqrt": (torch.sqrt, (chances(5, 3),)),
    "rsqrt": (torch.rsqrt, (chances(5, 3),)),
    "abs": (torch.abs, (x,)),
    "clamp": (torch.clamp, (x, -0.5, 0.5)),
    "where": (torch.where, (mask, x, row)),
    "maximum": (torch.maximum, (x, y)),
    "minimum": (torch.minimum, (x, row)),
    "eq": (torch.eq, (x, y)),
    "gt": (torch.gt, (x, 0.0)),
    "logical_not": (torch.logical_not, (mask,)),
    "lerp": (torch.lerp, (x, y, 0.3)),
    "lerp tensor": (torch.lerp, (x, y, chances(5, 3))),
    "addcmul": (torch.addcmul, (x, y, row, {"value": 0.5})),
    "addcdiv": (torch.addcdiv, (x, y, chances(5, 3))),
    "real": (torch.real, (torch.complex(x, y),)),
    "leaky_relu": (F.leaky_relu, (x, 0.1)),
    "softplus": (F.softplus, (x,)),
    "elu": (F.elu, (x,)),
    "hardtanh": (F.hardtanh, (x,)),
    "hardsigmoid": (F.hardsigmoid, (x,)),
    "hardswish": (F.hardswish, (x,)),
    "hardshrink": (F.hardshrink, (x,)),
    "softshrink": (F.softshrink, (x,)),
    "mish": (F.mish, (x,)),
    "complex mul": (torch.mul, (torch.complex(x, y), torch.complex(y, x))),
    "integers": (torch.bitwise_and, (ids(9, 5, 3), ids(9, 3))),
    "nothing": (torch.add, (reals(0, 3), row)),
    "of nothing": (torch.mul, (reals(2, 0), 2.0)),
}

REDUCTIONS: dict[str, Sample] = {
    "sum": (torch.sum, (x,)),
    "sum dim": (torch.sum, (cube, (0, 2))),
    "sum kept": (torch.sum, (x, -1, True)),
    "sum nothing": (torch.sum, (reals(0, 3), 0)),
    "mean": (torch.mean, (x,)),
    "mean dim": (torch.mean, (cube, (0, 1))),
    "nansum": (torch.nansum, (torch.where(mask, torch.nan, x), 0)),
    "count_nonzero": (torch.count_nonzero, (ids(3, 5, 3), 0)),
    "prod": (torch.prod, (x,)),
    "prod dim": (torch.prod, (x, 0)),
    "amax": (torch.amax, (distinct(5, 3), 0)),
    "amin": (torch.amin, (distinct(5, 2, 3), (0, 2))),
    "aminmax": (torch.aminmax, (distinct(5, 3), {"dim": 0})),
    "max": (torch.max, (distinct(5, 3),)),
    "max dim": (torch.max, (x, 0)),
    "min": (torch.min, (distinct(5, 3),)),
    "min dim": (torch.min, (x, 1)),
    "any": (torch.any, (mask,)),
    "any dim": (torch.any, (mask, 0)),
    "all": (torch.all, (mask, 1)),
    "is any true": (aten._is_any_true.default, (mask,)),
    "is all true": (aten._is_all_true.default, (mask,)),
    "argmax": (torch.argmax, (x,)),
    "argmax dim": (torch.argmax, (x, 0)),
    "argmin": (torch.argmin, (x, 1, True)),
    "argsort": (aten.argsort.default, (x, 0)),
    "sort": (torch.sort, (x, 0, True)),
    "topk": (torch.topk, (x, 2, 0)),
    "kthvalue": (torch.kthvalue, (x, 2, 0)),
    "median": (torch.median, (x, 0)),
    "median all": (torch.median, (x,)),
    "nanmedian": (torch.nanmedian, (x, 0)),
    "mode": (torch.mode, (ids(3, 5, 3), 0)),
    "histc": (lambda x: torch.histc(x, 5, -2, 4), (ids(6, 7, 3).double() - 2,)),
    "histc of all": (torch.histc, (ids(6, 7, 3).double() - 2, 3)),
    "bincount": (torch.bincount, (ids(9, 7), reals(7))),
    "cumsum": (torch.cumsum, (x, 0)),
    "cumprod": (torch.cumprod, (x, 0)),
    "cummax": (torch.cummax, (x, 0)),
    "cummin": (torch.cummin, (x, 1)),
    "logcumsumexp": (torch.logcumsumexp, (x, 0)),
}

VIEWS: dict[str, Sample] = {
    "view": (aten.view.default, (cube, [5, 6])),
    "view merges": (aten.view.default, (reals(4, 3, 2), [12, 2])),
    "view splits": (aten.view.default, (reals(8, 3), [4, 2, 3])),
    "view dtype": (aten.view.dtype, (ids(9, 5, 3).double(), torch.int64)),
    "reshape": (aten.reshape.default, (cube, [10, 3])),
    "unsafe view": (aten._unsafe_view.default, (cube, [10, 3])),
    "reshape alias": (aten._reshape_alias.default, (x, [15], [1])),
    "expand": (aten.expand.default, (column, [2, 5, 3])),
    "permute": (aten.permute.default, (cube, [2, 0, 1])),
    "squeeze": (aten.squeeze.default, (column,)),
    "squeeze dim": (aten.squeeze.dim, (column, -1)),
    "unsqueeze": (aten.unsqueeze.default, (x, 1)),
    "t": (aten.t.default, (x,)),
    "transpose": (aten.transpose.int, (cube, 0, -1)),
    "conj": (aten._conj.default, (torch.complex(x, y),)),
    "neg view": (aten._neg_view.default, (x,)),
    "as_strided": (aten.as_strided.default, (x, [3, 5], [1, 3])),
    "as complex": (aten.view_as_complex.default, (reals(5, 3, 2),)),
    "as real": (aten.view_as_real.default, (torch.complex(x, y),)),
}

PARTS: dict[str, Sample] = {
    "select": (aten.select.int, (cube, 0, 3)),
    "select_backward": (aten.select_backward.default, (reals(2, 3), [5, 2, 3], 0, 3)),
    "select_scatter": (torch.select_scatter, (cube, reals(5, 3), 1, 1)),
    "slice": (aten.slice.Tensor, (x, 0, 1, 4, 2)),
    "slice_backward": (aten.slice_backward.default, (reals(2, 3), [5, 3], 0, 1, 4, 2)),
    "slice_scatter": (torch.slice_scatter, (x, reals(2, 3), {"dim": 0, "start": 1, "end": 3})),
    "diagonal": (aten.diagonal.default, (cube, 0, 0, 2)),
    "diagonal_backward": (aten.diagonal_backward.default, (reals(3), [5, 3], 0, 0, 1)),
    "diagonal_scatter": (torch.diagonal_scatter, (x, reals(3))),
    "diag_embed": (torch.diag_embed, (x,)),
    "split": (aten.split.Tensor, (x, 2)),
    "split_with_sizes": (aten.split_with_sizes.default, (x, [1, 4])),
    "unsafe_split": (torch.unsafe_split, (x, 2)),
    "unsafe_split_with_sizes": (torch.unsafe_split_with_sizes, (x, [2, 3])),
    "unbind": (aten.unbind.int, (x, 1)),
    "unfold": (aten.unfold.default, (x, 0, 2, 1)),
    "unfold_backward": (aten.unfold_backward.default, (reals(4, 3, 2), [5, 3], 0, 2, 1)),
}

JOINS: dict[str, Sample] = {
    "cat": (torch.cat, ([x, reals(2, 3)], 0)),
    "cat columns": (torch.cat, ([x, column, y], 1)),
    "stack": (torch.stack, ([x, y], 1)),
    "flip": (torch.flip, (cube, (0, 2))),
    "roll": (torch.roll, (x, 2, 0)),
    "rot90": (torch.rot90, (x,)),
    "repeat": (aten.repeat.default, (x, [2, 3])),
    "pad": (F.pad, (x, (1, 0, 0, 2))),
    "tril": (torch.tril, (x,)),
    "triu": (torch.triu, (cube, 1)),
    "zeros_like": (aten.zeros_like.default, (x,)),
    "ones_like": (aten.ones_like.default, (x,)),
    "full_like": (aten.full_like.default, (x, 2.5)),
    "new_zeros": (aten.new_zeros.default, (x, [5, 3])),
    "new_ones": (aten.new_ones.default, (x, [2, 4])),
    "new_full": (aten.new_full.default, (x, [5, 3], 2.5)),
}

INDEXING: dict[str, Sample] = {
    "gather": (torch.gather, (x, 0, ids(5, 4, 3))),
    "scatter": (torch.scatter, (x, 0, torch.tensor([[0, 1, 2], [3, 4, 0]]), reals(2, 3))),
    "scatter_add": (torch.scatter_add, (x, 0, ids(5, 4, 3), reals(4, 3))),
    "scatter_reduce": (torch.scatter_reduce, (distinct(5, 3), 0, ids(5, 4, 3), distinct(4, 3) + 0.5, "amax")),
    "index": (aten.index.Tensor, (x, [ids(5, 4)])),
    "index two": (aten.index.Tensor, (cube, [ids(5, 4), None, ids(3, 4)])),
    "index_put": (torch.index_put, (x, (torch.tensor([3, 0]),), reals(2, 3))),
    "index_put added": (torch.index_put, (x, (ids(5, 4),), reals(4, 3), True)),
    "index_put impl": (aten._index_put_impl.default, (x, [torch.tensor([3, 0])], reals(2, 3), False)),
    "index_select": (torch.index_select, (x, 0, ids(5, 7))),
    "index_add": (torch.index_add, (x, 0, ids(5, 7), reals(7, 3))),
    "index_copy": (torch.index_copy, (x, 0, torch.tensor([4, 1]), reals(2, 3))),
    "index_fill": (torch.index_fill, (x, 0, torch.tensor([4, 1]), 1.5)),
}

PRODUCTS: dict[str, Sample] = {
    "mm": (torch.mm, (x, reals(3, 7))),
    "bmm": (torch.bmm, (reals(3, 5, 2), reals(3, 2, 3))),
    "mv": (torch.mv, (x, row)),
    "dot": (torch.dot, (reals(5), reals(5))),
    "vdot": (torch.vdot, (reals(5), reals(5))),
    "outer": (aten.outer.default, (reals(5), row)),
    "ger": (aten.ger.default, (reals(5), row)),
    "addmm": (torch.addmm, (reals(7), x, reals(3, 7))),
    "addmv": (torch.addmv, (reals(5), x, row)),
    "addr": (torch.addr, (x, reals(5), row)),
    "baddbmm": (torch.baddbmm, (reals(3, 5, 3), reals(3, 5, 2), reals(3, 2, 3))),
    "addbmm": (torch.addbmm, (x, reals(2, 5, 2), reals(2, 2, 3))),
    "linear": (F.linear, (x, reals(7, 3))),
    "linear bias": (F.linear, (cube, reals(7, 3), reals(7))),
    "linear vector": (F.linear, (row, reals(7, 3))),
    "matmul": (torch.matmul, (cube, reals(3, 7))),
    "matmul batches": (torch.matmul, (reals(3, 1, 5, 2), reals(2, 2, 3))),
    "matmul vector": (torch.matmul, (cube, row)),
    "vector matmul": (torch.matmul, (row, reals(3, 5))),
    "vectors": (torch.matmul, (row, reals(3))),
}

NETWORKS: dict[str, Sample] = {
    "softmax": (torch.softmax, (cube, 1)),
    "log_softmax": (torch.log_softmax, (x, -1)),
    "layer_norm": (F.layer_norm, (cube, (3,), reals(3), reals(3))),
    "layer_norm two": (F.layer_norm, (cube, (2, 3))),
    "group_norm": (F.group_norm, (reals(5, 6, 3), 3, reals(6), reals(6))),
    "group_norm of positions": (F.group_norm, (reals(3, 4, 2, 2), 1)),
    "embedding": (F.embedding, (ids(7, 5, 2), reals(7, 3))),
    "embedding padded": (F.embedding, (ids(7, 5, 2), reals(7, 3), 1)),
    "embedding_bag": (F.embedding_bag, (ids(7, 5, 2), reals(7, 3))),
    "embedding_bag largest": (F.embedding_bag, (ids(7, 5, 2), reals(7, 3), {"mode": "max", "padding_idx": 1})),
    "embedding_bag padded": (F.embedding_bag, (ids(7, 5, 3), reals(7, 3), {"padding_idx": -2})),
    "embedding_bag of offsets": (F.embedding_bag, (ids(7, 9), reals(7, 3), torch.tensor([0, 4, 4, 7]))),
    "embedding_bag weighted": (
        partial(F.embedding_bag, mode="sum", include_last_offset=True),
        (ids(7, 9), reals(7, 3), torch.tensor([0, 2, 9]), {"per_sample_weights": reals(9)}),
    ),
    "weight_norm": (torch._weight_norm, (reals(5, 3, 2), chances(5, 1, 1))),
    "weight_norm of columns": (torch._weight_norm, (x, row.view(1, 3), 1)),
    "dropout_backward": (aten.native_dropout_backward.default, (x, mask, 2.0)),
    "cross_entropy": (F.cross_entropy, (x, ids(3, 5))),
    "cross_entropy sum": (F.cross_entropy, (x, ids(3, 5), {"reduction": "sum"})),
    "cross_entropy none": (F.cross_entropy, (x, ids(3, 5), {"reduction": "none"})),
    "cross_entropy of bytes": (F.cross_entropy, (x, ids(3, 5).byte())),
    "cross_entropy ignored": (F.cross_entropy, (x, ids(3, 5), {"ignore_index": 1})),
    "cross_entropy weighted": (F.cross_entropy, (x, ids(3, 5), chances(3))),
    "cross_entropy smooth": (F.cross_entropy, (x, ids(3, 5), {"label_smoothing": 0.1})),
    "cross_entropy chances": (F.cross_entropy, (x, chances(5, 3))),
    "nll": (F.nll_loss, (x, ids(3, 5), {"reduction": "sum"})),
    "nll2d": (F.nll_loss, (reals(5, 3, 2, 2), ids(3, 5, 2, 2), {"reduction": "sum"})),
    "ctc": (F.ctc_loss, (frames, 1 + ids(3, 5, 3), sizes + 4, sizes, {"zero_infinity": True})),
    "ctc none": (F.ctc_loss, (frames, 1 + ids(3, 5, 3), sizes + 4, sizes, {"reduction": "none"})),
    "ctc of joined targets": (F.ctc_loss, (frames, 1 + ids(3, int(sizes.sum())), sizes + 4, sizes, 0, "sum")),
    "ctc of one": (F.ctc_loss, (frames[:, 0], 1 + ids(3, 2), sizes[0] + 5, sizes[0])),
    "mse": (F.mse_loss, (x, y)),
    "mse sum": (F.mse_loss, (x, y, {"reduction": "sum"})),
    "huber": (F.huber_loss, (x, y)),
    "smooth_l1": (F.smooth_l1_loss, (x, y, {"reduction": "sum"})),
    "soft margin": (F.soft_margin_loss, (x, torch.where(mask, 1.0, -1.0).double())),
    "multilabel margin": (F.multilabel_margin_loss, (x, listed)),
    "multilabel margin sum": (F.multilabel_margin_loss, (x, listed, {"reduction": "sum"})),
    "multilabel margin none": (F.multilabel_margin_loss, (x, listed, {"reduction": "none"})),
    "multilabel margin of one": (F.multilabel_margin_loss, (x[0], listed[0])),
    "multi margin": (F.multi_margin_loss, (x, ids(3, 5), {"reduction": "none"})),
    "multi margin of one": (F.multi_margin_loss, (x[0], torch.tensor(1), {"reduction": "none"})),
    "bce": (F.binary_cross_entropy, (chances(5, 3), chances(5, 3))),
    "bce logits": (F.binary_cross_entropy_with_logits, (x, chances(5, 3))),
    "attention": (F.scaled_dot_product_attention, (reals(2, 3, 5, 4), reals(2, 3, 6, 4), reals(2, 3, 6, 2))),
    "attention causal": (
        F.scaled_dot_product_attention,
        (reals(2, 3, 5, 4), reals(2, 3, 5, 4), reals(2, 3, 5, 4), {"is_causal": True}),
    ),
    "attention masked": (
        F.scaled_dot_product_attention,
        (reals(2, 3, 5, 4), reals(2, 3, 6, 4), reals(2, 3, 6, 4), reals(5, 6)),
    ),
    "attention grouped": (
        F.scaled_dot_product_attention,
        (reals(2, 4, 3, 4), reals(2, 2, 3, 4), reals(2, 2, 3, 4), {"enable_gqa": True}),
    ),
}

FAMILIES = {
    "batched": BATCHED,
    "copy": COPIES,
    "pointwise": POINTWISE,
    "reduction": REDUCTIONS,
    "view": VIEWS,
    "part": PARTS,
    "join": JOINS,
    "index": INDEXING,
    "product": PRODUCTS,
    "network": NETWORKS,
}
SAMPLES: dict[str, Sample] = {f"{family}: {name}": s for family, table in FAMILIES.items() for name, s in table.items()}
WITHOUT_VALUES = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
"""Operators that leave memory as it is: only the shape and layout of what they make can be checked."""
ELSEWHERE = ("aten::_grouped_mm", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward")
"""Those of no double precision, or not on CPUs: `test_grouped_matmul.py` and `test_fused_norms.py` have theirs."""


# -- every operator that torch tags pointwise, its arguments made up from its schema


def tagged() -> list[Any]:
    """List torch's pointwise operators without their `out` overloads."""
    packets = (getattr(aten, name) for name in dir(aten) if not name.startswith("__"))
    overloads = (
        getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()
    )
    return [f for f in overloads if torch.Tag.pointwise in f.tags and not any(a.is_out for a in f._schema.arguments)]


def accepted_arguments(func: Any) -> tuple[Any, ...] | None:
    """Find arguments that the operator accepts: numbers in (0, 1), whole numbers or booleans; None without any."""
    for tensor, scalar in ((chances, 0.5), (lambda *shape: ids(3, *shape), 2), (truths, True)):
        shapes = iter([(5, 3), *(((5, 3), (5, 3)) if func._schema.is_mutable else ((3,), (5, 1)))])
        args = tuple(_argument(a, tensor, scalar, shapes) for a in func._schema.arguments if not a.has_default_value())
        try:
            func(*(x.clone() if isinstance(x, Tensor) else x for x in args))
        except (RuntimeError, TypeError, NotImplementedError, StopIteration):
            continue
        return args
    return None


def _argument(argument: Any, tensor: Callable[..., Tensor], scalar: Any, shapes: Any) -> Any:
    match str(argument.type):
        case "Tensor":
            return tensor(*next(shapes))
        case "int":
            return 1
        case "str":
            return "floor"
        case "Optional[str]":
            return "floor"
        case _:
            return scalar
