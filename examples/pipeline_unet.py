"""Train a U-shaped model as two stages on two meshes: four local ranks, the losses equal to one device.

python examples/pipeline_unet.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from dshard import DeviceMesh, Replicate, Shard, distribute_module, distribute_tensor, launch
from dshard.pipeline import Pipeline, Stage

STEPS = 3


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shrink = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        skip = F.gelu(self.conv(x))
        return self.shrink(skip), skip


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow, self.conv = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat([self.grow(x), skip], 1))


def channels(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
    """Split the channels of the last convolution; what is left is replicated."""
    if name == "conv":
        for key, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(key, distribute_tensor(parameter, mesh, [Shard(0)]))


def train(pipelined: bool, tell: object = None) -> list[float]:
    torch.manual_seed(0)
    down, up = Down().double(), Up().double()
    x, target = torch.randn(2, 12, 2, 8, 8, dtype=torch.float64)
    if not pipelined:
        optimizer, losses = torch.optim.SGD([*down.parameters(), *up.parameters()], lr=0.1), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = F.mse_loss(up(*down(x)), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])  # every rank makes both
    if first.get_coordinate() is not None:
        distribute_module(down, first)
    else:
        distribute_module(up, second, channels)
    stages = [
        Stage(down, first, gives=["x", "skip"], placements={"x": [Shard(0)]}),  # data parallel
        Stage(up, second, takes=["x", "skip"], placements={"target": [Replicate()]}),  # channels
    ]
    pipeline = Pipeline(stages, n_microbatches=4, schedule="eager-1f1b", loss=F.mse_loss)
    optimizer, losses = torch.optim.SGD(pipeline.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipeline.step(x, target).item())
        optimizer.step()
    return losses


if __name__ == "__main__":
    alone = train(False)
    together = launch.run(partial(train, True), print, ranks=4, device="cpu")
    for step, losses in enumerate(zip(alone, together, strict=True)):
        print(f"step {step}: one device {losses[0]:.12f}, two stages {losses[1]:.12f}")
    assert torch.allclose(torch.tensor(alone), torch.tensor(together), rtol=0, atol=1e-12)
