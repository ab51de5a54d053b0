"""Gradients of rehearsed modules arise in the buffers that reduce them, unless something else holds one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dshard import init_device_mesh, parallelize, rehearsing
from dshard.comm import pieces
from dshard.comm.pieces import JoinedViews, lying_together
from dshard.comm.workspace import Session
from dshard.testing import RankPool, whole

WIDTH = 32


class Model(nn.Module):
    """Matmuls, norms and biases, a look-up, a weight of odd size, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.last = nn.Linear(WIDTH, 7), nn.Linear(7, 3, bias=False)  # behind which no part is aligned
        self.words, self.norm = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(self.norm(self.words(words)))
        x = self.again(x.relu()) + self.again(x)
        return self.last(self.odd(x)).square().mean()  # type: ignore[no-any-return]


def memory(*sizes: int) -> list[Tensor]:
    """Tensors that lie together in one memory."""
    return JoinedViews([(size,) for size in sizes]).unpack(torch.arange(float(sum(sizes))), Session())


def test_tensors_that_fill_a_memory_lie_together() -> None:
    found = lying_together(memory(2, 3, 1), torch.float32)
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "hold",
    [
        lambda xs: xs[0].detach(),
        lambda xs: xs[1].view(-1),
        lambda xs: xs[1].numpy(),
        lambda xs: xs[2].untyped_storage(),
        lambda xs: xs.pop(1),
        lambda xs: xs.pop(),
        lambda xs: xs.reverse(),
        lambda xs: xs.insert(1, torch.zeros(2)),
    ],
)
def test_tensors_do_not_lie_together_if_anything_else_is_there(hold: Any) -> None:
    xs = memory(2, 3, 1)
    held = hold(xs)
    assert lying_together(xs, torch.float32) is None
    del held


def packed_in_place(keeps: bool, plan: str, shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Any]:
    """How many buckets of the last steps were not copied, of how many, and what differs from steps by Python."""
    found: list[bool] = []

    def counting(tensors: list[Tensor], dtype: torch.dtype) -> Tensor | None:
        flat = lying_together(tensors, dtype)
        found.append(flat is not None)
        return flat

    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), Model()
    words = torch.randint(11, (64, 20))
    by_python, rehearsed = (parallelize(copy.deepcopy(model), mesh, plan, words) for _ in range(2))
    kept: list[tuple[Tensor, Tensor]] = []
    before, pieces.lying_together = pieces.lying_together, counting
    try:
        for _ in range(5):
            losses = []
            for each, is_rehearsed in ((by_python, False), (rehearsed, True)):
                each.zero_grad()
                found.clear()
                with rehearsing(is_rehearsed):
                    losses.append(each(words))
                    if keeps:  # of the node that gives the gradients, before any hook of a leaf
                        losses[-1].grad_fn.register_hook(
                            lambda grads, _: kept.extend(
                                (x, x.to_local().clone()) for x in grads if x is not None and hasattr(x, "to_local")
                            )
                        )
                    losses[-1].backward()
    finally:
        pieces.lying_together = before
    names_, models = [name for name, _ in model.named_parameters()], (by_python, rehearsed)
    grads = [{name: whole(dict(each.named_parameters())[name].grad) for name in names_} for each in models]
    return {
        "in place": sum(found),
        "buckets": len(found),
        "differs": [name for name in names_ if not torch.equal(grads[0][name], grads[1][name])],
        "written": [tuple(x.shape) for x, then in kept if not torch.equal(x.to_local(), then)],
        "kept": len(kept),
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plan", "shape", "names"),
    [
        pytest.param("data", (4,), ("dp",), marks=pytest.mark.thorough),
        ("data x megatron", (2, 2), ("dp", "tp")),
    ],
)
def test_gradients_are_not_copied_to_be_reduced(
    ranks: RankPool, plan: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    for found in ranks.run(packed_in_place, False, plan, shape, names):
        assert found["differs"] == []
        assert found["in place"] >= 1


@pytest.mark.ranks
def test_a_gradient_that_a_hook_has_kept_stays_as_it_was(ranks: RankPool) -> None:
    for found in ranks.run(packed_in_place, True, "data", (4,), ("dp",)):
        assert found["differs"] == []
        assert found["in place"] == 0
        assert found["kept"]
        assert found["written"] == []
