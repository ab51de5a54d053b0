"""Cross entropy of logits whose classes are sharded over the mesh, without gathering them.

The loss of a token is log(sum exp(x - max x)) - (x[target] - max x). Of each of the three terms a rank has that of its
own classes, so a token costs three numbers all-reduced forward, and none backward, however many classes there are: the
vocab parallel cross entropy of Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dshard import comm
from dshard.errors import LayoutError
from dshard.mesh import Coordinate
from dshard.ops.lookup import refuse
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard
from dshard.tensor import DTensor, distribute_tensor


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within the block `cross_entropy`, `log_softmax` and `nll_loss` never gather the classes of distributed logits.

    The classes are dim 1 of the logits, or dim 0 where that is the only one. A plain target or class weight is taken as
    replicated where the batch is replicated. The loss is that of one device: every reduction, `ignore_index`, class
    weights and label smoothing, on meshes of any rank, with batch dims sharded too. A cross entropy takes three
    all_reduces forward, of a number for each token, and none backward. Replicated classes, and targets that are
    probabilities, take the usual operators.

    Raises:
        LayoutError: a plain target for logits whose batch is sharded.
    """
    with _LossMode():
        yield


class _LossMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = _RUN.get(func)
        out = NotImplemented if run is None else run(*args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out


class _Split(NamedTuple):
    """Logits whose classes are sharded: the dim of the classes, and the mesh axes that shard it."""

    x: DTensor
    dim: int
    axes: tuple[int, ...]

    def without_classes(self, op: ReduceOp | None) -> list[Placement]:
        """The placements of a tensor like the logits with size 1 in the class dim: replicated or partial over it."""
        layout = self.x.layout
        rest: Placement = Replicate() if op is None else Partial(op)
        return [rest if i in self.axes else placement for i, placement in enumerate(layout.placements)]

    def target_placements(self) -> list[Placement]:
        """The placements of targets: those of the logits without the class dim."""
        shifted = self.without_classes(None)
        return [Shard(p.dim - (p.dim > self.dim)) if isinstance(p, Shard) else p for p in shifted]


def _split(x: Any, dim: int) -> _Split | None:
    """The logits with partial sums reduced, if their classes are sharded; else None."""
    if not isinstance(x, DTensor) or x.ndim == 0:
        return None
    dim %= x.ndim
    axes = tuple(axis for axis in x.layout.axes_of(dim) if x.layout.mesh.shape[axis] > 1)
    if not axes or x.layout.order:
        return None
    if x.layout.partial_axes():
        x = x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])
    return _Split(x, dim, axes)


def _reduced(of: _Split, part: Tensor, op: ReduceOp) -> DTensor:
    """Reduce a number for each token over the axes that shard the classes: one all_reduce."""
    shape = [1 if i == of.dim else size for i, size in enumerate(of.x.shape)]
    pending = DTensor.from_local(part, of.x.layout.mesh, of.without_classes(op), shape=shape)
    return pending.redistribute(placements=of.without_classes(None))


def _shifted(of: _Split) -> tuple[Tensor, Any]:
    """The local logits minus the global maximum of their token, and log(sum exp) of those over all classes."""
    local = of.x.to_local().to(_working(of.x.dtype))
    held = local.detach()
    if _some_rank_has_none(of):
        held = F.pad(held.movedim(of.dim, -1), (0, 1), value=-torch.inf).movedim(-1, of.dim)
    most = _reduced(of, held.amax(of.dim, keepdim=True), "max").to_local()
    shifted = local - most
    return shifted, _reduced(of, shifted.exp().sum(of.dim, keepdim=True), "sum").log()


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _some_rank_has_none(of: _Split) -> bool:
    layout, size = of.x.layout, of.x.shape[of.dim]
    return any(not layout.dim_range(of.dim, size, at) for at in layout.mesh.coordinates())


def _log_softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    of = None if dim is None else _split(input, dim)
    if of is None:
        return NotImplemented
    if dtype is not None:
        of = of._replace(x=of.x.to(dtype))  # type: ignore[arg-type]
    shifted, log = _shifted(of)
    local = (shifted - log.to_local(grad_placements=_summed(of))).to(of.x.dtype)
    return DTensor.from_local(local, of.x.layout.mesh, of.x.placements, shape=of.x.shape)


def _summed(of: _Split) -> list[Placement]:
    """The gradient placements of a replicated number that each rank uses for its own classes: partial sums."""
    return of.without_classes("sum")


def _picked(of: _Split, log_probabilities: Tensor, target: DTensor, ignored: int) -> Tensor:
    """The log probability of each token's target: zero on ranks without the class, then summed."""
    layout, size = of.x.layout, of.x.shape[of.dim]

    def bounds(at: Coordinate, device: torch.device) -> Tensor:
        held = layout.dim_range(of.dim, size, at)
        return torch.tensor([held.start, held.stop], device=device)

    first, end = comm.local_of(layout, bounds).unbind()
    classes = target.to_local().unsqueeze(of.dim)
    _refuse(classes, size, ignored)
    in_chunk = (classes >= first) & (classes < end)
    padded = log_probabilities
    if _some_rank_has_none(of):
        padded = F.pad(padded.movedim(of.dim, -1), (0, 1)).movedim(-1, of.dim)
    picked = padded.gather(of.dim, torch.where(in_chunk, classes - first, 0))
    return _reduced(of, torch.where(in_chunk, picked, 0), "sum").squeeze(of.dim)


def _nll_loss(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    of = _split(input, min(1, input.ndim - 1))
    if of is None or size_average is not None or reduce is not None:
        return NotImplemented
    target, weight = _laid(of, target, weight)
    _check(of, target)
    picked = -_picked(of, of.x.to_local(), target, ignore_index)
    return _total(of, picked, target, weight, ignore_index, reduction, None, 0.0)


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    of = _split(input, min(1, input.ndim - 1))
    if of is None or size_average is not None or reduce is not None or target.is_floating_point():
        return NotImplemented
    target, weight = _laid(of, target, weight)
    _check(of, target)
    shifted, log = _shifted(of)
    losses = log.squeeze(of.dim) - _picked(of, shifted, target, ignore_index)
    spread = None
    if label_smoothing:
        spread = _smooth(of, shifted, log, weight)
    return _total(of, losses, target, weight, ignore_index, reduction, spread, label_smoothing)


def _smooth(of: _Split, shifted: Tensor, log: DTensor, weight: DTensor | None) -> Tensor:
    """The weighted loss of each token against all classes, for label smoothing: sum_c w_c (log - x_c)."""
    classes = of.x.shape[of.dim]
    if weight is None:
        return log.squeeze(of.dim) * classes - _reduced(of, shifted.sum(of.dim, keepdim=True), "sum").squeeze(of.dim)
    placements = [Shard(0) if i in of.axes else Replicate() for i in range(of.x.layout.mesh.ndim)]
    held = weight.redistribute(placements=placements).to_local()
    held = held.view([-1 if i == of.dim else 1 for i in range(of.x.ndim)])
    weighed = _reduced(of, (shifted * held).sum(of.dim, keepdim=True), "sum").squeeze(of.dim)
    return log.squeeze(of.dim) * weight.sum() - weighed


def _total(
    of: _Split,
    losses: Tensor,
    target: DTensor,
    weight: DTensor | None,
    ignored: int,
    reduction: str,
    spread: Tensor | None,
    smoothing: float,
) -> Tensor:
    """The losses of tokens, weighted and reduced as torch does; those of ignored tokens are zero."""
    kept = target != ignored
    weights = kept.to(losses.dtype)
    if weight is not None:
        weights = torch.where(kept, F.embedding(torch.where(kept, target, 0), weight.unsqueeze(1)).squeeze(-1), 0.0)
    each = torch.where(kept, losses * weights, 0.0)
    if spread is not None:
        smooth = torch.where(kept, spread, 0.0) / of.x.shape[of.dim]
        each = each * (1 - smoothing) + smooth * smoothing
    match reduction:
        case "none":
            out = each
        case "sum":
            out = each.sum()
        case "mean":
            out = each.sum() / weights.sum()
        case _:
            raise ValueError(f"{reduction} is not a valid value for reduction")
    return out.to(of.x.dtype)


def _laid(of: _Split, target: Tensor, weight: Tensor | None) -> tuple[DTensor, DTensor | None]:
    """Target and class weights as distributed tensors, in the layouts that the local work needs."""
    mesh, placements = of.x.layout.mesh, of.target_placements()
    if not isinstance(target, DTensor):
        if any(isinstance(placement, Shard) for placement in placements):
            raise LayoutError(
                f"loss_parallel: a plain target of shape {tuple(target.shape)} for logits laid out [{of.x.layout}]: "
                f"lay it out with distribute_tensor(target, mesh, {placements})"
            )
        target = DTensor.from_local(target, mesh, placements, shape=target.shape)
    if weight is not None and not isinstance(weight, DTensor):
        weight = distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    if weight is not None:
        weight = weight.redistribute(placements=[Replicate()] * mesh.ndim)
    return target.redistribute(placements=placements), weight


def _refuse(wanted: Tensor, size: int, ignored: int) -> None:
    """Refuse targets that are no class, as torch does."""
    for classes in comm.unstack(wanted).values() if isinstance(wanted, comm.LocalTensor) else (wanted,):
        with comm.plain():
            refuse(classes, ((classes < 0) | (classes >= size)) & (classes != ignored), size, 1)


def _check(of: _Split, target: DTensor) -> None:
    """Run torch's own checks of shapes on meta tensors."""
    with comm.plain(), torch.no_grad():
        x = torch.empty(of.x.shape, device="meta")
        F.nll_loss(x, torch.empty(target.shape, dtype=target.dtype, device="meta"))


_RUN: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.log_softmax: _log_softmax,
    torch.log_softmax: lambda x, dim, dtype=None: _log_softmax(x, dim, dtype=dtype),
    Tensor.log_softmax: lambda x, dim, dtype=None: _log_softmax(x, dim, dtype=dtype),
}
"""Functions that run in place of torch's where the classes are sharded."""
