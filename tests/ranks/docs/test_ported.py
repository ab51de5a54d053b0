"""docs/ported.md: each right side runs on four ranks, and means what it means on one device."""

from __future__ import annotations

import re
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import dshard
from dshard.testing import RankPool

PAGE = (Path(__file__).parents[3] / "docs" / "ported.md").read_text()
ROWS = re.findall(r'```py title="dshard.*?"\n(.*?)```', PAGE, re.DOTALL)
LAYOUTS = dict.fromkeys(row for row in ROWS if "parallelize(" in row)
STEPS = dict.fromkeys(row for row in ROWS if "parallelize(" not in row)
BATCH, TOKENS, WIDTH, CLASSES = 8, 4, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.scale(x.mean(1)))


def loss_of(model: nn.Module, batch: Any, plain: bool = False) -> Tensor:
    laid_out = isinstance(next(model.parameters()), dshard.DTensor)
    x, y = dshard.distribute_batch(model, batch) if laid_out and not plain else batch
    return F.cross_entropy(model(x), y)


def names(path: str) -> dict[str, Any]:
    """What the fragments take for granted."""
    torch.manual_seed(0)
    model = Model().double()
    x, y = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (BATCH,))
    halves = (x[:4], y[:4]), (x[4:], y[4:])
    return {
        **vars(torch.utils.data),
        "init_device_mesh": dshard.init_device_mesh,
        "parallelize": dshard.parallelize,
        "AdamW": AdamW,
        "AveragedModel": AveragedModel,
        "F": F,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "batches": [halves],
        "clip_grad_norm_": clip_grad_norm_,
        "dataset": TensorDataset(x, y),
        "dshard": dshard,
        "first": halves[0],
        "loss_of": loss_of,
        "model": model,
        "optimizer": AdamW(model.parameters()),
        "path": path,
        "second": halves[1],
        "torch": torch,
        "x": x,
        "y": y,
    }


ALONE = types.SimpleNamespace(
    accumulate=nullcontext, data_ranks=lambda model: (1, 0), batches=lambda model, loader: loader
)
"""dshard on one device: its names mean nothing."""


def left_by(space: dict[str, Any]) -> list[Tensor]:
    """Loss, parameters and gradients, whole."""
    model = space["model"]
    found = [space[name] for name in ("loss", "value", "norm") if name in space]
    found += [each for p in model.parameters() for each in (p, p.grad) if each is not None]
    found += list(space["average"].parameters()) if "average" in space else []
    return [torch.as_tensor(t.full_tensor() if isinstance(t, dshard.DTensor) else t).detach() for t in found]


def trained(row: str) -> list[list[Tensor]]:
    """A step after a layout, on ranks and alone."""
    laid, alone = names(""), names("")
    exec(row, laid)
    x, y = laid["x"], laid["y"]
    batch: Any = (x, y)
    if "per-data-rank" in row:
        n, i = dshard.data_ranks(laid["model"])
        batch = (x.chunk(n)[i], y.chunk(n)[i])
    for space, given in ((laid, batch), (alone, (x, y))):
        is_plain = '"plain"' in row and space is laid
        loss = space["loss"] = loss_of(space["model"], given, is_plain)
        loss.backward()
        if is_plain:  # the mean of each data rank's rows
            assert type(loss) is Tensor
            dist.all_reduce(loss)
            space["loss"] = loss / 4
    return [left_by(laid), left_by(alone)]


def stepped(row: str, path: str) -> list[list[Tensor]]:
    """A fragment of a training loop, on ranks and alone."""
    laid, alone = names(path), names(path)
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = {"inputs": "per-data-rank"} if "DataLoader" in row else {}
    dshard.parallelize(laid["model"], mesh, "fsdp x megatron", laid["x"], **rows)
    laid["optimizer"] = AdamW(laid["model"].parameters())
    alone["dshard"] = ALONE
    for each in (laid, alone) if "checkpoint" in row else ():
        loss_of(each["model"], (each["x"], each["y"])).backward()
        each["optimizer"].step()
    exec(row, laid)
    alone["DataLoader"] = lambda dataset, batch, sampler: DataLoader(dataset, 2 * batch)
    if "checkpoint" not in row:  # which one device saves and loads by other means
        exec(row, alone)
    return [left_by(laid), left_by(alone)]


@pytest.mark.ranks
@pytest.mark.parametrize("row", one_in(4, LAYOUTS), ids=lambda row: row.splitlines()[-1])
def test_a_layout_of_the_page_is_one_device(ranks: RankPool, row: str) -> None:
    close: dict[str, Any] = {"rtol": 5e-2, "atol": 5e-2, "check_dtype": False} if "bf16" in row else {}

    for laid, alone in ranks.run(trained, row):
        torch.testing.assert_close(laid, alone, **close)


@pytest.mark.ranks
@pytest.mark.parametrize("row", one_in(4, STEPS), ids=lambda row: row.splitlines()[0])
def test_a_step_of_the_page_is_one_device(ranks: RankPool, row: str, tmp_path: Path) -> None:
    for laid, alone in ranks.run(stepped, row, str(tmp_path / "latest")):
        torch.testing.assert_close(laid, alone)
