"""Lightning's `ModelParallelStrategy` trains a parallelized model as one device does, also from a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dshard import data_ranks, parallelize
from dshard.testing import RankPool

lightning = pytest.importorskip("lightning")

ROWS, BATCHES = 24, 3
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 5)).double()


def rows() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=source, dtype=torch.float64), torch.randint(5, (ROWS,), generator=source)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A network that is laid out by `plan`, or is on one device where there is none."""

    def __init__(self, plan: str | None) -> None:
        super().__init__()
        self.plan, self.net, self.errors = plan, network(), list[float]()

    def configure_model(self) -> None:
        if self.plan is not None:
            example = torch.zeros(8, 6, dtype=torch.float64)
            parallelize(self.net, self.device_mesh, self.plan, example, inputs="per-data-rank", outputs="plain")

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("error", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.errors.append(float(self.trainer.callback_metrics["error"]))

    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(*rows())
        ranks, rank = (1, 0) if self.plan is None else data_ranks(self.net)
        sampler = DistributedSampler(data, ranks, rank, shuffle=False)  # Lightning's own shuffles
        return DataLoader(data, ROWS // BATCHES // ranks, sampler=sampler)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(plan: str | None, sizes: tuple[int, int], epochs: int, accumulate: int = 1, **places: Any) -> Module:
    """Train by Lightning for some epochs, on a mesh of these sizes; `places` are `resume`, `save` and `whole`."""
    module, whole = Module(plan), places.get("whole", False)
    kind = lightning.pytorch.strategies.ModelParallelStrategy
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if plan is None else 4,
        strategy="auto" if plan is None else kind(*sizes, save_distributed_checkpoint=not whole),
        max_epochs=epochs,
        gradient_clip_val=0.05,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, ckpt_path=places.get("resume"))
    if "save" in places:
        trainer.save_checkpoint(places["save"])
    return module


def as_torchrun() -> dict[str, str]:
    """The environment in which Lightning takes the ranks that are there."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    ids = {"TORCHELASTIC_RUN_ID": "0", "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
    return ids | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def equal(module: Module, single: Module) -> None:
    for (name, ours), theirs in zip(module.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, msg=lambda text, name=name: f"{name}: {text}")


def trains(plan: str, sizes: tuple[int, int], accumulate: int) -> None:
    single = fit(None, (1, 1), 2, accumulate)
    with mock.patch.dict(os.environ, as_torchrun()):
        module = fit(plan, sizes, 2, accumulate)
    equal(module, single)
    assert module.errors == pytest.approx(single.errors)
    assert module.errors[1] < module.errors[0]


def resumes(folder: str, whole: bool) -> None:
    single = fit(None, (1, 1), 2)
    with mock.patch.dict(os.environ, as_torchrun()):
        fit("fsdp x megatron", (2, 2), 1, save=f"{folder}/half", whole=whole)
        module = fit("fsdp", (4, 1), 2, resume=f"{folder}/half", whole=whole)
    equal(module, single)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("plan", "sizes"), [("data x data", (4, 1)), ("fsdp x megatron", (2, 2)), ("data x megatron-sp", (2, 2))]
)
def test_lightning_trains_as_on_one_device(ranks: RankPool, plan: str, sizes: tuple[int, int], accumulate: int) -> None:
    ranks.run(trains, plan, sizes, accumulate, timeout=300.0)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("whole", [False, True])
def test_lightning_goes_on_from_a_checkpoint_on_another_mesh(ranks: RankPool, tmp_path: Path, whole: bool) -> None:
    ranks.run(resumes, str(tmp_path), whole, timeout=300.0)
