"""Inputs that are whole beside rows of each data rank: told by their names, by the example, or by their sizes."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dshard
from dshard import LayoutError, parallelize
from dshard.testing import RankPool

LENGTH = 4


class Net(nn.Module):
    """An embedding of tokens and of positions, `more["scale"]` for each position and `more["weights"]` for each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.head = nn.Embedding(9, 6), nn.Embedding(9, 6), nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor, positions: Tensor, more: dict[str, Tensor] | None = None) -> Any:
        out = self.head(self.tokens(x) + self.places(positions)).squeeze(-1)
        if more is not None:
            out = out * more["scale"]
            out = out * more["weights"][:, None]
        return out


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    return dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def batch(rows: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(9, (rows, LENGTH), generator=generator)
    scale, weights = (torch.randn(n, dtype=torch.float64, generator=generator) for n in (LENGTH, rows))
    return x, torch.arange(LENGTH), {"scale": scale, "weights": weights}


FORMS: dict[str, Any] = {
    "by names": {"positions": "global", "scale": "global"},
    "by paths": {"positions": "global", "more.scale": "global", "more": "per-data-rank", "*": "per-data-rank"},
    "rows alone": {"x": "per-data-rank", "more.weights": "per-data-rank", "*": "global"},
    "by the example": "per-data-rank",
}


def whole_beside_rows(form: str) -> list[str]:
    """Calls, with as many positions as rows on each data rank, that differ from one device's."""
    wrong = []
    for plan, shape in (("data", (4,)), ("data x megatron", (2, 2))):
        n = shape[0]
        x, positions, more = batch(n * LENGTH)
        wants = Net()(x, positions), Net()(x, positions, more)
        example = (x, positions, more) if form == "by the example" else (x[:LENGTH], positions)
        model = parallelize(Net(), mesh_of(shape), plan, *example, inputs=FORMS[form])
        at = dshard.data_ranks(model)[1]
        own = slice(at * LENGTH, (at + 1) * LENGTH)
        rows, rest = x[own], {"weights": more["weights"][own], "scale": more["scale"]}
        gots = model(rows, positions), model(positions=positions, x=rows, more=rest)
        laid_out = dshard.distribute_batch(model, {"x": rows, "positions": positions, "more": rest})
        if form != "by the example":  # which has names for arguments of the model alone
            gots, wants = (*gots, model(**laid_out)), (*wants, wants[1])
        for i, (got, want) in enumerate(zip(gots, wants, strict=True)):
            if got.shape != want.shape or not torch.allclose(got.full_tensor(), want, atol=1e-12):
                wrong.append(f"{plan}, call {i}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_whole_beside_as_many_rows(ranks: RankPool, form: str) -> None:
    assert ranks.run(whole_beside_rows, form) == [[]] * 4


def wrongly_named() -> list[str]:
    """What is said of inputs that are not what they are named, or count as rows by their size."""
    x, positions, _ = batch(4 * LENGTH)
    rank, said = torch.distributed.get_rank(), []
    own = x[rank * LENGTH : (rank + 1) * LENGTH]

    def call(inputs: Any, *args: Tensor) -> None:
        model = parallelize(Net(), mesh_of((4,)), "data", x[:LENGTH], positions, inputs=inputs)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(*args)
        except (LayoutError, RuntimeError) as error:
            said.append(str(error) if isinstance(error, LayoutError) else "")
        said.extend(str(each.message) for each in caught)

    call("per-data-rank", own, positions)
    call({"positions": "per-data-rank"}, own, torch.arange(LENGTH + 1))
    call({"positions": "global"}, own, positions + rank // 2)
    call({"positions": "global"}, own, positions)
    return said


@pytest.mark.ranks
def test_inputs_that_are_not_what_they_are_named_are_told(ranks: RankPool) -> None:
    for i, (by_size, *named) in enumerate(ranks.run(wrongly_named)):
        if i == 0:  # the first rank warns
            assert by_size == ""  # the model refuses so many positions
            by_size, *named = named
            assert "input positions is alike on all ranks" in by_size
            assert "{'positions': 'global'}" in by_size
        no_rows, differs = named
        assert "positions of shape (5,) is named 'per-data-rank', but has not as many entries" in no_rows
        assert "different data, positions, on ranks [0, 1] and ranks [2, 3]" in differs


@pytest.mark.parametrize("inputs", ["rows", {"x": "rows"}, {3: "global"}, None])
def test_modes_that_are_none_are_refused(inputs: Any) -> None:
    x, positions, _ = batch(LENGTH)

    with pytest.raises(LayoutError, match="inputs"):
        parallelize(Net(), dshard.Mesh((2,), ("a",)), "data", x, positions, inputs=inputs)
