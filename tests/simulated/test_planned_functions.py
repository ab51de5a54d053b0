"""Models that call one function of torch between two layers: "auto" plans each, and the step is that of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn

from dshard import Mesh, Topology, parallelize, use_topology
from dshard.parallel import plan_model
from dshard.testing import simulated, whole

MESH = Mesh((2, 2), ("x", "y"))
BATCH = torch.linspace(-2, 2, 48, dtype=torch.float64).reshape(8, 6).sin()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max of a dim": lambda h: h.max(-1).values,
    "max": lambda h: h.max() * h,
    "least of rows": lambda h: h.min(0).values,
    "median": lambda h: h.median(-1).values,
    "topk": lambda h: h.topk(5, -1).values,
    "places of topk": lambda h: h.topk(5, -1, largest=False).indices * h[:, :5],
    "sort": lambda h: h.sort(-1).values,
    "cummax": lambda h: h.cummax(-1).values,
    "unbind": lambda h: h.unbind(-1)[3],
    "aminmax": lambda h: torch.aminmax(h, dim=-1).max,
    "var_mean": lambda h: torch.var_mean(h, -1)[1],
    "quantile": lambda h: h.quantile(0.3, 0),
    "diff": lambda h: h.diff(),
    "roll": lambda h: h.roll(3, 0),
    "tril": lambda h: h.tril(),
    "diagonal": lambda h: h.diagonal(),
    "norm": lambda h: h.norm(dim=-1),
    "renorm": lambda h: h.renorm(2, 0, 1.0),
    "softmax of rows": lambda h: h.softmax(0),
    "normalize": F.normalize,
    "group norm": lambda h: F.group_norm(h, 4),
    "pdist": F.pdist,
    "cdist": lambda h: torch.cdist(h, h * 2),
    "similarities": lambda h: F.cosine_similarity(h, h.roll(1, 0)),
    "outer": lambda h: torch.outer(h[0], h[1]),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, h),
    "kron": lambda h: torch.kron(h[:2], h[2:4]),
    "block_diag": lambda h: torch.block_diag(h[:2], h[2:]),
    "cumsum": lambda h: h.cumsum(0),
    "gather": lambda h: h.gather(1, h.argsort(1)),
    "scatter": lambda h: h.scatter(1, h.argsort(1)[:, :4], h[:, :4]),
    "scatter_add": lambda h: h.scatter_add(0, h.argsort(0), h),
    "scatter_reduce": lambda h: h.scatter_reduce(0, h.argsort(0) % 2, h, "amax"),
    "index_add": lambda h: h.index_add(0, torch.tensor([1, 0]), h[:2]),
    "list of rows": lambda h: h[[1, 2]],
    "where": lambda h: torch.where(h > 0, h, h * 2),
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argmax(-1, keepdim=True), 1),
    "unfold": lambda h: h.unfold(1, 4, 2),
    "repeat": lambda h: h.repeat(2, 3),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 0),
    "columns in two": lambda h: h.reshape(16, 8),
    "movedim": lambda h: h.movedim(0, 1).contiguous(),
    "split": lambda h: h.split([3, 5, 8], 1)[1],
    "split rows": lambda h: h.split(5, 0)[1],
    "steps": lambda h: h[1:6:2],
    "cat": lambda h: torch.cat([h, h[:3]]),
    "stack": lambda h: torch.stack([h, h.exp()], 1),
    "circular pad": lambda h: F.pad(h[None], (1, 2), mode="circular"),
    "max_pool": lambda h: F.max_pool1d(h[None], 3, 2),
    "interpolate": lambda h: F.interpolate(h[None], size=9, mode="linear"),
    "convolution": lambda h: F.conv1d(h[:, None], h[:2, None, :3]),
    "fft": lambda h: torch.fft.fft(h).abs(),
    "complex": lambda h: torch.complex(h, h.cos()).abs(),
    "solve": lambda h: torch.linalg.solve(h @ h.T + torch.eye(8, dtype=h.dtype), h),
    "logsumexp": lambda h: torch.logsumexp(h, 0),
    "prod": lambda h: h.prod(-1),
    "clamp by the mean": lambda h: h.clamp(min=h.mean()),
    "embedding": lambda h: F.embedding(torch.tensor([0, 2]), h),
    "cross entropy": lambda h: F.cross_entropy(h, h.argmax(-1)),
    "an item": lambda h: h.sum().item() * h,
    "put": lambda h: h.index_put((torch.tensor([0]),), h[1]),
    "written in place": lambda h: (h * 1).unsqueeze_(0).mul_(h),
    "pad_sequence": lambda h: nn.utils.rnn.pad_sequence([h[:3], h[3:]]),
    "bytes": lambda h: F.cross_entropy(h, torch.arange(8, dtype=torch.uint8)),
    "meshgrid": lambda h: torch.meshgrid(h[0], h[1], indexing="ij")[0],
}

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "prelu": lambda h: F.prelu(h, torch.tensor(0.2).double()),
    "masked_fill": lambda h: h.masked_fill(h > 0, torch.tensor(1.0)),
    "index_fill": lambda h: h.index_fill(0, torch.tensor([1]), torch.tensor(2.0)),
    "index_select": lambda h: h.index_select(0, torch.tensor(1)),
    "expand_as": lambda h: h * torch.tensor(2.0).expand_as(h),
}
"""Functions that call torch with a plain tensor without dims."""
FUNCTIONS |= NUMBERS


class Between(nn.Module):
    """A layer, a function, and a weighted sum of what that gives."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = FUNCTIONS[name]
        self.up, self.scale = nn.Linear(6, 16), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        flat = self.function(h).flatten()
        return (flat * torch.arange(flat.numel()) * self.scale).sum() + h.square().mean()


def model(name: str) -> Between:
    torch.manual_seed(0)
    return Between(name).double()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_step_with_a_plain_tensor_without_dims_is_priced(name: str) -> None:
    assert plan_model(model(name), MESH, "auto", BATCH).cost is not None


@pytest.mark.parametrize("name", one_in(12, FUNCTIONS))
def test_a_model_that_calls_it_is_planned(name: str) -> None:
    alone = model(name)
    alone(BATCH).backward()
    with simulated(MESH), use_topology(Topology.preset("dgx-h100")):
        laid_out = parallelize(model(name), MESH, "auto", BATCH)
        for _ in range(3):  # by Python, derived, by a program
            laid_out.zero_grad()
            laid_out(BATCH).backward()
        found = [whole(p.grad) for p in laid_out.parameters()]
    for mine, parameter in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-9)
