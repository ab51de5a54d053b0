"""Train with PyTorch Lightning, data parallel and tensor parallel on four ranks: its Trainer, a model laid out here.

python examples/lightning_train.py        # Lightning starts the ranks; under torchrun it takes those that are there

Needs lightning. `parallelize` stands in `configure_model`, on the mesh of Lightning's `ModelParallelStrategy`; loaders,
logging, clipping, evaluation and checkpoints are Lightning's own.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dshard import DTensor, parallelize

try:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError:
    print("this example needs lightning: pip install lightning")
    sys.exit()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(lightning.LightningModule):
    def __init__(self, strategy="fsdp x megatron"):  # an axis for the batch, one for features
        super().__init__()
        self.strategy = strategy
        torch.manual_seed(0)  # the same parameters on all ranks
        self.net = nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), nn.Linear(32, 4))

    def configure_model(self):  # Lightning calls it once its ranks and their mesh are there
        if not isinstance(self.net[0].weight, DTensor):  # and again before a test
            rows = {"inputs": "per-data-rank", "outputs": "plain"}
            parallelize(self.net, self.device_mesh, self.strategy, torch.zeros(16, 8), **rows)

    def training_step(self, batch, number):
        x, y = batch  # the rows of this data rank
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(-1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def made_up(rows, seed):
    """Points on a sphere; the class is the largest of the first coordinates."""
    x = F.normalize(torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), dim=1)
    return TensorDataset(x, x[:, :4].argmax(1))


def main():
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
        max_epochs=2,
        gradient_clip_val=1.0,
        log_every_n_steps=8,
        enable_progress_bar=False,
        enable_checkpointing=False,  # True writes a checkpoint of torch.distributed.checkpoint at each epoch
        logger=False,
    )
    trainer.fit(Classifier(), DataLoader(made_up(512, 0), 16, shuffle=True), DataLoader(made_up(128, 1), 16))
    if trainer.is_global_zero:
        print(*(f"{name} {value:.3f}" for name, value in sorted(trainer.callback_metrics.items())))


if __name__ == "__main__":
    main()
