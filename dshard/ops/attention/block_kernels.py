"""Attention of local tensors restricted to blocks of the scores, with the log-sum-exp of each row.

The kernels of the device hold no scores: flash attention on CPUs and CUDA, memory-efficient attention on CUDA. If none
supports the operands, single operators run, in single precision at least. A backward kernel with the result and the
log-sum-exp of all blocks of a row returns the gradients of one block (FlashAttention-2, Dao 2023, section 3.2).

Tensors have four dims here: query (batch, heads, queries, d), key (batch, key heads, keys, d), value (batch, key heads,
keys, e), mask (batch, heads, queries, keys), of which any may be 1. Results and sums over blocks are wide: in single
precision at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.comm import HALF, kernel_device, sum_dtype
from dshard.ops.attention.score_functions import Held, Operands, attend_held, held_gradients
from dshard.rules.attention_blocks import Block, join_of, reach, square_diagonals

_aten = torch.ops.aten


class KeyPanel(NamedTuple):
    """Queries, keys, values and perhaps a mask, of whose scores, times `scale`, only the `blocks` count."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    blocks: Sequence[Block]
    scale: float
    held: Held | None = None


_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


class _Kernel(NamedTuple):
    """Forward: the result and the log-sum-exp of each row.

    Backward: the gradients, of the result's gradient, the operands, the result or else the product of both summed over
    the last dim, and the log-sum-exp.
    """

    forward: Callable[[Operands], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Operands, Tensor, Tensor], _Gradients]
    takes_result: bool


class BlockResult:
    """Attention of local queries to the blocks seen so far: the result, and the log-sum-exp of each row.

    Query heads that share a key head are a dim of their own until the end, as in the kernels.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.q, self.size = q, v.shape[-1]
        self.reached: list[range] = []
        self.merged: tuple[Tensor, Tensor] | None = None

    def add(self, panel: KeyPanel) -> None:
        """Merge attention to the blocks of a panel into the result."""
        rows = self.q.shape[-2]
        for block in _blocks(panel):
            operands = _operands(panel, block)
            block_result = _attended(operands)
            match join_of(block, self.reached, rows):
                case "taken":
                    self.merged = block_result
                case "copied":
                    for all_rows, part in zip(self._wide((*operands.q.shape[:2], rows)), block_result, strict=True):
                        _span(all_rows, 2, block.queries).copy_(part)
                case "merged":
                    self._merge(block.queries, *block_result)
            reach(self.reached, block.queries)

    def complete(self) -> tuple[Tensor, Tensor]:
        """The result, wide if blocks were merged, and the log-sum-exps: minus infinity for rows that see no key."""
        lead = self.q.shape[:-1]
        out, lse = self._wide(lead) if self.merged is None else self.merged
        return out.reshape(*lead, self.size), lse.reshape(lead)

    def _merge(self, queries: range, part: Tensor, part_lse: Tensor) -> None:
        out, lse = self._wide(())
        result, rows = _span(out, 2, queries), _span(lse, 2, queries)
        share = (part_lse - rows).sigmoid().nan_to_num_(0.0)  # a row that has seen no key in either has none
        result.lerp_(part.to(result.dtype), share.to(result.dtype).unsqueeze(-1))
        torch.logaddexp(rows, part_lse, out=rows)

    def _wide(self, lead: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The result so far, in single precision at least; before the first block zeros with these leading dims."""
        dtype = sum_dtype(self.q.dtype)
        if self.merged is None:
            out = self.q.new_zeros((*lead, self.size), dtype=dtype)
            self.merged = out, out.new_full(lead, -inf)
        out, lse = self.merged
        self.merged = out.to(dtype), lse
        return self.merged


class RowGradients:
    """The gradient of a result, and the statistics of its rows over all panels that backward kernels need.

    `delta` is the product of the gradient with the result summed over the last dim, `lse` the log-sum-exp. If the
    result is not held, `out` makes a substitute.
    """

    def __init__(self, grad: Tensor, delta: Tensor, lse: Tensor, out: Tensor | None = None) -> None:
        self.grad, self.delta, self.known = grad, delta, out
        self.lse = lse.masked_fill(lse == -inf, inf)  # exp(score - inf) is no weight, even where the score is -inf

    @property
    def out(self) -> Tensor:
        """The result, or a substitute with the same `delta`."""
        if self.known is None:
            self.known = _result_with(self.grad, self.delta)
        return self.known


def accumulate_gradients(totals: Sequence[Tensor | None], rows: RowGradients, panel: KeyPanel) -> None:
    """Add the gradients of query, key, value and mask by the blocks of a panel to `totals` in place; None: not needed.

    `rows` are the full rows of the result.
    """
    of_mask = len(totals) > 3 and totals[3] is not None
    for block, gradients in block_gradients(rows, panel, of_mask):
        add_gradients(totals, panel, block, gradients)


def block_gradients(rows: RowGradients, panel: KeyPanel, of_mask: bool) -> Iterator[tuple[Block, Sequence[Tensor]]]:
    """Yield each block of a panel with its gradients of query, key and value, and with `of_mask` of the scores.

    `rows` are the full rows of the result.
    """
    for block in _blocks(panel):
        operands = _operands(panel, block)
        kernel, lead = _kernel_of(operands), operands.q.shape[:-1]
        lse, delta = (_span(x, -1, block.queries).reshape(lead) for x in (rows.lse, rows.delta))
        grad = _span(rows.grad, -2, block.queries)
        grad = grad.reshape(*lead, grad.shape[-1])
        if of_mask:
            yield block, held_gradients(grad, operands, delta, lse)
        elif kernel.takes_result:
            out = _span(rows.out, -2, block.queries).reshape(grad.shape)
            yield block, kernel.backward(grad, operands, out, lse)
        else:
            yield block, kernel.backward(grad, operands, delta, lse)


def add_gradients(totals: Sequence[Tensor | None], panel: KeyPanel, block: Block, gradients: Sequence[Tensor]) -> None:
    """Add the gradients of a block to the sums of query, key, value and mask, in place; None: not needed."""
    for total, part, span in zip(totals, gradients, (block.queries, block.keys, block.keys), strict=False):
        if total is not None:
            here = _span(total, -2, span)
            fewer = here.shape[:2] != panel.q.shape[:2]  # heads of the query share one of the key
            here.add_((part.sum(1) if fewer else part).reshape(here.shape))
    if len(totals) > 3 and (of_mask := totals[3]) is not None:
        here, scores = _span(_span(of_mask, -2, block.queries), -1, block.keys), gradients[3]
        heads = (*panel.q.shape[:2], *scores.shape[-2:])
        here.add_(scores.reshape(heads).sum_to_size(here.shape))


def _result_with(grad: Tensor, delta: Tensor) -> Tensor:
    """A substitute for the result with the same `delta`, for which alone kernels read it.

    Its rows have at most the norm of the result's, so that it rounds no worse.
    """
    precise = grad.to(delta.dtype)
    most = precise.abs().amax(-1, keepdim=True)
    zero = most == 0
    unit = precise / most.masked_fill(zero, 1.0)  # squares of tiny gradients would be zero
    length = (unit.square().sum(-1, keepdim=True) * most).masked_fill(zero, 1.0)
    return (unit * (delta.unsqueeze(-1) / length)).to(grad.dtype)


# -- one block as kernels take it


def _span(x: Tensor, dim: int, indices: range) -> Tensor:
    return x if x.shape[dim] in (1, len(indices)) else x.narrow(dim, indices.start, len(indices))


def _blocks(panel: KeyPanel) -> Sequence[Block]:
    """The blocks of a panel as the kernels of its device take them: but for CPUs with diagonals that are square."""
    return panel.blocks if kernel_device(panel.q.device) in ("cpu", "meta") else square_diagonals(panel.blocks)


def _operands(panel: KeyPanel, block: Block) -> Operands:
    q = _span(panel.q, -2, block.queries)
    k, v = (_span(x, -2, block.keys) for x in (panel.k, panel.v))
    mask = panel.mask
    if mask is not None:
        mask = _added(_span(_span(mask, -2, block.queries), -1, block.keys), panel.q.dtype)
    batch, heads, key_heads = *q.shape[:2], k.shape[1]
    if heads != key_heads:  # the heads that share one of the key become a dim in which that is expanded, not copied
        groups = heads // key_heads
        if mask is not None and mask.shape[:2] != (1, 1):
            mask = mask.expand(batch, heads, -1, -1).reshape(batch * key_heads, groups, *mask.shape[2:])
        q = q.reshape(batch * key_heads, groups, *q.shape[2:])
        k, v = (x.reshape(batch * key_heads, 1, *x.shape[2:]).expand(-1, groups, -1, -1) for x in (k, v))
    modify, drop = (None, None) if panel.held is None else (_on_block(each, panel, block) for each in panel.held)
    return Operands(q, k, v, mask, panel.scale, block.diagonal, modify, drop)


def _on_block(
    function: Callable[[Tensor, range, range], Tensor] | None, panel: KeyPanel, block: Block
) -> Callable[[Tensor], Tensor] | None:
    """A function of a block's scores with the dims of the panel, as one of scores with those of a kernel."""
    if function is None:
        return None

    def on_block(scores: Tensor) -> Tensor:
        out = function(scores.reshape(*panel.q.shape[:2], *scores.shape[2:]), block.queries, block.keys)
        return out.reshape(scores.shape)

    return on_block


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The additive form of a mask: minus infinity where a boolean mask is false."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), -inf)


def _attended(operands: Operands) -> tuple[Tensor, Tensor]:
    """Attention to a block, and the log-sum-exp of its rows; zeros for a row whose keys are all masked."""
    out, lse = _kernel_of(operands).forward(operands)
    if operands.mask is None:
        return out, lse
    all_masked = (operands.mask == -inf).all(-1)
    return out, lse.masked_fill(all_masked.expand(lse.shape), -inf)


# -- the kernels


def _kernel_of(operands: Operands) -> _Kernel:
    """The device's kernel that holds no scores, or the one of single operators."""
    q, k, v, mask = operands[:4]
    is_held = operands.modify is not None or operands.drop is not None
    if is_held or not all(x.numel() for x in (q, k, v)) or not q.is_floating_point():
        return _OPERATORS
    device = kernel_device(q.device)
    if device in ("cpu", "meta") and q.dtype in HALF and q.shape[-1] != v.shape[-1]:
        return _OPERATORS  # as torch on one device: its kernel takes one size, and rounds more
    if device in ("cpu", "meta"):
        return _FLASH_ON_CPU if torch.backends.cuda.flash_sdp_enabled() else _OPERATORS
    if device != "cuda" or mask is not None or max(q.shape[-1], v.shape[-1]) > 256:
        return _OPERATORS
    is_new = _capability(q.device) >= _AMPERE
    if is_new and q.dtype in HALF and torch.backends.cuda.flash_sdp_enabled():
        return _FLASH_ON_CUDA
    dtypes = {torch.float16, torch.float32, *(HALF if is_new else ())}
    fits = q.dtype in dtypes and torch.backends.cuda.mem_efficient_sdp_enabled()
    return _EFFICIENT_ON_CUDA if fits else _OPERATORS


_AMPERE = (8, 0)
"""From this compute capability on, torch's kernels include flash, and take bfloat16 (`sdp_utils.cpp`)."""


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; what stands for a GPU counts as one with all kernels."""
    is_real = device.type == "cuda" and torch.backends.cuda.is_built() and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_real else _AMPERE


def _of_one_size(operands: Operands, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with zeros appended to the last dim, until it is a `multiple` of one size.

    Rows begin at such a multiple, too: kernels of GPUs read several elements at once.
    """
    size = -(-max(operands.q.shape[-1], operands.v.shape[-1]) // multiple) * multiple
    q, k, v = (_to_size(x, size, multiple) for x in operands[:3])
    return q, k, v


def _to_size(x: Tensor, size: int, multiple: int = 1) -> Tensor:
    """`x` with zeros appended to the last dim, whose elements lie side by side: kernels read them so unasked."""
    if x.shape[-1] < size:
        return F.pad(x, (0, size - x.shape[-1]))
    apart = multiple > 1 and any(n % multiple for n in (x.storage_offset(), *x.stride()[:-1]))
    return x.clone(memory_format=torch.contiguous_format) if apart or x.stride(-1) != 1 else x


def _cut(gradients: Sequence[Tensor], operands: Operands) -> _Gradients:
    q, k, v = (_span(g, -1, range(x.shape[-1])) for g, x in zip(gradients, operands[:3], strict=True))
    return q, k, v


def _flash_on_cpu(o: Operands) -> tuple[Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(*_of_one_size(o), 0.0, o.diagonal, attn_mask=o.mask, scale=o.scale)
    return _span(out, -1, range(o.v.shape[-1])), lse


def _flash_on_cpu_backward(grad: Tensor, o: Operands, out: Tensor, lse: Tensor) -> _Gradients:
    q, k, v = _of_one_size(o)
    grad, out = (_to_size(x, v.shape[-1]) for x in (grad, out))
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return _cut(kernel(grad, q, k, v, out, lse, 0.0, o.diagonal, attn_mask=o.mask, scale=o.scale), o)


def _flash_on_cuda(o: Operands) -> tuple[Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(*_of_one_size(o, 8), 0.0, o.diagonal, scale=o.scale)
    return _span(out, -1, range(o.v.shape[-1])), lse


def _flash_on_cuda_backward(grad: Tensor, o: Operands, out: Tensor, lse: Tensor) -> _Gradients:
    q, k, v = _of_one_size(o, 8)
    lse = lse.contiguous()  # the kernel reads it as such, whatever its strides
    grad, out = (_to_size(x, v.shape[-1]) for x in (grad, out))
    kernel, none = _aten._scaled_dot_product_flash_attention_backward, q.new_empty(2, dtype=torch.uint64)
    sizes = q.shape[-2], k.shape[-2]
    gradients = kernel(grad, q, k, v, out, lse, None, None, *sizes, 0.0, o.diagonal, none, none, scale=o.scale)
    return _cut(gradients, o)


def _efficient_on_cuda(o: Operands) -> tuple[Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_efficient_attention
    out, lse, *_ = kernel(*_of_one_size(o, 8), None, True, 0.0, o.diagonal, scale=o.scale)
    return _span(out, -1, range(o.v.shape[-1])), _span(lse, -1, range(o.q.shape[-2]))


def _efficient_on_cuda_backward(grad: Tensor, o: Operands, out: Tensor, lse: Tensor) -> _Gradients:
    q, k, v = _of_one_size(o, 8)
    grad, out = (_to_size(x, v.shape[-1]) for x in (grad, out))
    if out.dtype in HALF:  # whose rows the kernel expects to hold all heads
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=inf)  # the kernel reads rows in blocks of 32
    kernel, none = _aten._scaled_dot_product_efficient_attention_backward, q.new_empty((), dtype=torch.int64)
    wanted = [True, True, True, False]
    gradients = kernel(grad, q, k, v, None, out, lse, none, none, 0.0, wanted, o.diagonal, scale=o.scale)
    return _cut(gradients[:3], o)


_FLASH_ON_CPU = _Kernel(_flash_on_cpu, _flash_on_cpu_backward, True)
_FLASH_ON_CUDA = _Kernel(_flash_on_cuda, _flash_on_cuda_backward, True)
_EFFICIENT_ON_CUDA = _Kernel(_efficient_on_cuda, _efficient_on_cuda_backward, True)
_OPERATORS = _Kernel(attend_held, lambda *operands: held_gradients(*operands)[:3], False)
