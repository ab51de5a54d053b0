"""Programs on which `explain`, `trace` and `strict` are compared, and the layouts of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor

MESH = Mesh((2, 2), ("dp", "tp"))
OTHER = Mesh((2, 2), ("a", "b"))
SHAPE = (8, 12)
LAYOUTS = tuple(
    Layout(MESH, placements)
    for placements in (
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(1)),
        (Partial(), Shard(0)),
        (Shard(1), Partial()),
    )
)


def on_mesh(like: DTensor, values: list[Any]) -> Any:
    """Return indices as a replicated tensor on the mesh of `like`."""
    return distribute_tensor(torch.tensor(values), like.device_mesh, src_data_rank=None)


def set_rows(x: Tensor) -> None:
    x[2:5] = 0.5


def set_row(x: Tensor) -> None:
    x[3] = 1.0


def set_masked(x: Tensor) -> None:
    x[x > 0] = 0.0


def write_view(x: Tensor) -> None:
    x.t()[1:3].mul_(2)


def backward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        leaf = x.detach().requires_grad_()
        function(leaf).sum().backward()

    return run


def completed(x: DTensor) -> DTensor:
    """Return `x`, replicated on the mesh axes where it was partial."""
    return x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])


def parameter(x: Tensor) -> nn.Parameter:
    """Return a parameter like `x` with a gradient, replicated where `x` is partial."""
    copy = nn.Parameter(completed(x).detach())
    copy.grad = copy.detach().clone()
    return copy


def clipped(foreach: bool | None, norm_type: float = 2.0) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        nn.utils.clip_grad_norm_([parameter(x), parameter(x)], 1.0, norm_type, foreach=foreach)

    return run


def stepped(make: Callable[..., Any], **options: Any) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        make([parameter(x)], lr=0.1, **options).step()

    return run


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[1:],
    "slice dim 1": lambda x: x[:, 2:7],
    "slice step": lambda x: x[::2],
    "narrow": lambda x: x.narrow(1, 3, 5),
    "select": lambda x: x[3],
    "select dim 1": lambda x: x.select(1, -1),
    "index": lambda x: x[[0, 3]],
    "mask": lambda x: x[x > 0],
    "roll": lambda x: x.roll(3, 0),
    "roll two": lambda x: x.roll((1, 2), (0, 1)),
    "roll flat": lambda x: x.roll(5),
    "flip": lambda x: x.flip(0),
    "flip two": lambda x: x.flip(0, 1),
    "rot90": lambda x: x.rot90(),
    "cat": lambda x: torch.cat([x, x]),
    "cat dim 1": lambda x: torch.cat([x, x.narrow(1, 0, 6)], 1),
    "stack": lambda x: torch.stack([x, x]),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad rows": lambda x: F.pad(x, (0, 0, 2, 0), value=1.0),
    "repeat": lambda x: x.repeat(2, 1),
    "tile": lambda x: x.tile(1, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "split": lambda x: x.split(3),
    "split even": lambda x: x.split(4, 1),
    "chunk": lambda x: x.chunk(3, 1),
    "tensor_split": lambda x: x.tensor_split(3),
    "unbind": lambda x: x.unbind(),
    "diff": lambda x: x.diff(dim=0),
    "diff dim 1": lambda x: x.diff(),
    "index_select": lambda x: x.index_select(0, on_mesh(x, [0, 5, 2])),
    "take": lambda x: x.take(on_mesh(x, [0, 5, 40])),
    "gather": lambda x: x.gather(1, on_mesh(x, [[0, 3]] * 8)),
    "scatter": lambda x: x.scatter(0, on_mesh(x, [[1] * 12]), 2.0),
    "index_add": lambda x: x.index_add(0, on_mesh(x, [1, 6]), x[:2].clone()),
    "multinomial": lambda x: x.abs().add(1).multinomial(2),
    "bernoulli": lambda x: x.sigmoid().bernoulli(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "softmax": lambda x: x.softmax(-1),
    "softmax rows": lambda x: x.softmax(0),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (12,)),
    "rms_norm": lambda x: F.rms_norm(x, (12,)),
    "cross_entropy": lambda x: F.cross_entropy(x, on_mesh(x, [0, 1, 2, 3, 4, 5, 6, 7])),
    "nll_loss": lambda x: F.nll_loss(x, on_mesh(x, [0, 1, 2, 3, 4, 5, 6, 7])),
    "embedding": lambda x: F.embedding(on_mesh(x, [1, 7, 3]), x),
    "cumsum": lambda x: x.cumsum(0),
    "cummax": lambda x: x.cummax(1),
    "sort": lambda x: x.sort(),
    "topk": lambda x: x.topk(1, 0),
    "median": lambda x: x.median(1),
    "argmax": lambda x: x.argmax(),
    "max dim": lambda x: x.max(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "var": lambda x: x.var(0),
    "norm": lambda x: x.norm(),
    "norm dim": lambda x: x.norm(dim=1),
    "mean": lambda x: x.mean(),
    "relu": lambda x: x.relu(),
    "gelu": lambda x: F.gelu(x),
    "add": lambda x: x + x,
    "add elsewhere": lambda x: x + x.redistribute(placements=[Replicate(), Shard(0)]),
    "matmul": lambda x: x @ x.t(),
    "matmul twice": lambda x: (x @ x.t()).relu() @ x,
    "linear": lambda x: F.linear(x, x),
    "reshape": lambda x: x.reshape(4, 24),
    "flatten": lambda x: x.flatten(),
    "triu": lambda x: x.triu(1),
    "tril_": lambda x: x.tril_(),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "lstsq": lambda x: torch.linalg.lstsq(x.t(), x.t()),
    "relu_": lambda x: x.relu_(),
    "cumsum_": lambda x: x.cumsum_(0),
    "add_": lambda x: x.add_(x.redistribute(placements=[Replicate(), Replicate()])),
    "setitem": set_rows,
    "setitem row": set_row,
    "setitem masked": set_masked,
    "setitem column": lambda x: x[:, 1:4].fill_(2.0),
    "write a view": write_view,
    "normal_": lambda x: x.normal_(),
    "out": lambda x: torch.cumsum(x, 0, out=torch.empty_like(x)),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.sum(0)[0].item(),
    "bool": lambda x: bool(x.max() > 0),
    "format": lambda x: f"{x.sum():.3f}",
    "print": lambda x: repr(x),
    "equal": lambda x: x.equal(x),
    "allclose": lambda x: x.allclose(x),
    "isfinite": lambda x: x.isfinite().all(),
    "full_tensor": lambda x: x.full_tensor(),
    "redistribute": lambda x: x.redistribute(placements=[Shard(1), Shard(0)]),
    "to another mesh": lambda x: completed(x).redistribute(OTHER, [Shard(0), Shard(0)]),
    "to_local": lambda x: x.to_local(),
    "distribute_tensor": lambda x: distribute_tensor(torch.ones(SHAPE), x.device_mesh, [Shard(1), Replicate()]),
    "from_local": lambda x: DTensor.from_local(torch.ones(4, 3), x.device_mesh, [Shard(1), Replicate()]),
    "from_local checked": lambda x: DTensor.from_local(
        torch.ones(4, 3), x.device_mesh, [Shard(0), Replicate()], run_check=True
    ),
    "clip_grad_norm_": clipped(None),
    "clip_grad_norm_ foreach": clipped(True),
    "clip_grad_norm_ max": clipped(True, torch.inf),
    "sgd": stepped(torch.optim.SGD),
    "sgd foreach": stepped(torch.optim.SGD, foreach=True, momentum=0.9),
    "sgd fused": stepped(torch.optim.SGD, fused=True),
    "adam": stepped(torch.optim.Adam),
    "adam foreach": stepped(torch.optim.Adam, foreach=True),
    "adamw fused": stepped(torch.optim.AdamW, fused=True),
    "backward of a product": backward(lambda x: (x @ x.t()).sin()),
    "backward of softmax": backward(lambda x: x.softmax(-1).square()),
    "backward of a slice": backward(lambda x: x[1:].square()),
    "backward of layer_norm": backward(lambda x: F.layer_norm(x, (12,)).square()),
}
