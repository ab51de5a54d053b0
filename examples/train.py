"""A training program: a loader, autocast, accumulation, clipping, a schedule, evaluation, checkpoints.

torchrun --nproc-per-node 4 examples/train.py --mesh 2 2 --strategy "fsdp x megatron" --steps 20
torchrun --nproc-per-node 4 examples/train.py --mesh 4 --strategy fsdp --steps 40    # goes on, on another mesh
python examples/train.py --steps 60                                                  # and on one device
"""

import argparse
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dshard
from dshard.checkpoint import load, save

WIDTH, CLASSES, BATCH, MICROBATCHES = 32, 4, 64, 2  # a step takes BATCH rows, in two parts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):  # yours: nothing in it knows about layouts
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made_up(rows, seed, device):
    """Points on a sphere; the class is the largest of the first coordinates."""
    x = F.normalize(torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), dim=1)
    return TensorDataset(x.to(device), x[:, :CLASSES].argmax(1).to(device))


def batches(loader, first):
    """The batches of all epochs, from number `first` on."""
    for epoch in count(first // len(loader)):
        loader.generator.manual_seed(epoch)  # the same order on all ranks
        yield from islice(loader, first % len(loader), None)
        first = 0


def loss_of(model, x, y):
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(model(x), y)


@torch.no_grad()
def accuracy_of(model, loader):
    model.eval()
    right = rows = 0
    for x, y in loader:
        right += (model(x).argmax(-1) == y).sum().item()
        rows += len(y)
    model.train()
    return right / rows


def main(options):
    torch.manual_seed(0)  # the same parameters on all ranks
    mesh = dshard.init_device_mesh(options.device, tuple(options.mesh))
    device = mesh.device_type
    model, train, test = Model().to(device), made_up(1024, 0, device), made_up(256, 1, device)
    dshard.parallelize(model, mesh, options.strategy, torch.zeros(BATCH, 8))  # the one line that is about layouts
    for block in model.blocks if options.compile else ():
        block.compile()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5) * 0.98**step)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "rng": dshard.get_rng_state()}
    if (Path(options.folder) / ".metadata").exists():
        load(state, options.folder)  # whatever mesh and strategy saved it
        dshard.set_rng_state(state["rng"])
        if dist.get_rank() == 0:
            print(f"resumed after step {state['step']}", flush=True)

    loader = DataLoader(train, BATCH // MICROBATCHES, shuffle=True, generator=torch.Generator())
    stream = batches(loader, state["step"] * MICROBATCHES)
    for step in range(state["step"] + 1, options.steps + 1):
        with dshard.accumulate():  # gradients are reduced once
            for x, y in islice(stream, MICROBATCHES - 1):
                (loss_of(model, x, y) / MICROBATCHES).backward()
        loss = loss_of(model, *next(stream))
        (loss / MICROBATCHES).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0:
            right = accuracy_of(model, DataLoader(test, BATCH))  # on all ranks, and one prints
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.4f}, gradient {norm:.3f}, accuracy {right:.3f}", flush=True)
            save({**state, "step": step, "rng": dshard.get_rng_state()}, options.folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", type=int, nargs="+", default=[1])
    parser.add_argument("--strategy", default="data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="/tmp/dshard-training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    main(parser.parse_args())
