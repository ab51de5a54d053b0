"""Networks that are no transformers, planned call by call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn

from dshard import Mesh, Replicate, Shard, Topology, parallelize, plan_model, use_topology
from dshard.parallel import Auto
from dshard.parallel.trace_step import record_step
from dshard.parallel.whole_plan import as_plan
from dshard.planning.plan_step import plan_step
from dshard.planning.step_tables import StepTables
from dshard.testing import simulated, whole

MESH = Mesh((2, 2), ("x", "y"))


class Module(nn.Module):
    """A module of some parts, by their names, and a function of them and of the input."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.of = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.of(self, *inputs)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8), nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def unet(m: nn.Module, x: Tensor) -> Tensor:
    down = F.silu(m.a(x))
    up = F.interpolate(m.b(F.avg_pool2d(down, 2)), scale_factor=2.0)
    return m.c(torch.cat([down, F.pad(up, (0, 0, 0, 0)).roll(1, -1)], 1))  # type: ignore[no-any-return]


def recurrent(m: nn.Module, x: Tensor) -> Tensor:
    return m.out(m.gru(m.lstm(x)[0])[0][:, -1])  # type: ignore[no-any-return]


def gated(m: nn.Module, x: Tensor) -> Tensor:
    a, b, c = m.packed(x).split([4, 4, 8], -1)
    largest = b[:, :1].flip(-1) + b.max(-1).values[..., None]
    return m.out(F.glu(c, -1) * a.sigmoid().cumsum(1) + largest)  # type: ignore[no-any-return]


def linear_attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in m.packed(x).chunk(3, -1))
    state = (k.softmax(-2).unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
    return m.out((q.unsqueeze(-2) @ state).squeeze(-2).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def windows(m: nn.Module, x: Tensor) -> Tensor:
    return m.out(m.up(x).unfold(1, 3, 1).amax(-1).diagonal(0, 1, 2))  # type: ignore[no-any-return]


def interactions(m: nn.Module, dense: Tensor, ids: Tensor) -> Tensor:
    z = torch.stack([m.bottom(dense), m.a(ids), m.b(ids.flip(0))], 1)
    first, second = torch.triu_indices(3, 3, 1)
    return m.top(torch.cat([z[:, 0], (z @ z.mT)[:, first, second]], 1))  # type: ignore[no-any-return]


def fourier(m: nn.Module, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(m.up(x), dim=1)[:, :3]
    return m.out(torch.fft.irfft(spectrum * spectrum.conj(), n=6, dim=1))  # type: ignore[no-any-return]


def quantiles(m: nn.Module, x: Tensor) -> Tensor:
    z = m.up(x)
    return m.out(torch.complex(z, z.tanh()).abs()) * z.quantile(0.3, -1)[..., None]  # type: ignore[no-any-return]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


IMAGES, ROWS, IDS = (drawn(4, 3, 8, 8),), (drawn(4, 6, 8),), torch.arange(12).view(4, 3)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "convolutions": (convolutions, IMAGES),
    "unet": (
        lambda: Module(unet, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 8, 1), c=nn.Conv2d(16, 2, 3, padding=1)),
        IMAGES,
    ),
    "recurrent": (
        lambda: Module(
            recurrent,
            lstm=nn.LSTM(8, 8, batch_first=True),
            gru=nn.GRU(8, 8, batch_first=True, bidirectional=True),
            out=nn.Linear(16, 8),
        ),
        ROWS,
    ),
    "gated": (lambda: Module(gated, packed=nn.Linear(8, 16), out=nn.Linear(4, 8)), ROWS),
    "linear attention": (lambda: Module(linear_attention, packed=nn.Linear(8, 48), out=nn.Linear(16, 8)), ROWS),
    "windows": (lambda: Module(windows, up=nn.Linear(8, 16), out=nn.Linear(4, 8)), ROWS),
    "interactions": (
        lambda: Module(
            interactions,
            bottom=nn.Linear(5, 8),
            a=nn.EmbeddingBag(12, 8),
            b=nn.EmbeddingBag(12, 8, mode="sum"),
            top=nn.Linear(11, 2),
        ),
        (drawn(4, 5), IDS),
    ),
    "quantiles": (lambda: Module(quantiles, up=nn.Linear(8, 16), out=nn.Linear(16, 8)), ROWS),
    "fourier": (lambda: Module(fourier, up=nn.Linear(8, 16), out=nn.Linear(16, 8)), ROWS),
}


@pytest.mark.parametrize("network", one_in(3, NETWORKS))
def test_networks_are_planned_call_by_call_and_compute_what_one_device_does(network: str) -> None:
    make, inputs = NETWORKS[network]
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    torch.manual_seed(0)
    alone, topology = make().double(), Topology.preset("dgx-h100")
    model = copy.deepcopy(alone)
    alone(*inputs).square().mean().backward()
    with torch.device("meta"):
        graph = record_step(make().double(), tuple(x.to("meta") for x in inputs), {}).graph().copies()
    plan = as_plan(graph, plan_step(StepTables(graph, MESH, topology)), MESH)
    with simulated(MESH), use_topology(topology):
        parallelize(model, MESH, plan)
        model(*inputs).square().mean().backward()
        found = [whole(p.grad) for p in model.parameters()]
    for mine, parameter in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["data", "megatron"])
def test_networks_that_change_shapes_in_place_are_laid_out_by_name(name: str) -> None:
    """As `quantile` does to what it gathers."""
    make, inputs = NETWORKS["quantiles"]
    roles = plan_model(make(), Mesh((2,), ("x",)), name, *inputs)
    assert roles.parameters["up.weight"] == ((Shard(0),) if name == "megatron" else (Replicate(),))


def test_a_search_that_ends_at_once_is_not_dearer_than_data_parallelism() -> None:
    """Calls within an LSTM are laid out by cost, whatever is planned of them, so its plan may be dear."""
    with torch.device("meta"):
        model, batch = nn.LSTM(64, 128, 2, batch_first=True), torch.empty(64, 4, 64)
    with use_topology(Topology.preset("dgx-h100")):
        data = plan_model(model, MESH, "data x data", batch)
        auto = plan_model(model, MESH, Auto(seconds=0.01), batch)
    assert auto.cost.seconds <= data.cost.seconds
