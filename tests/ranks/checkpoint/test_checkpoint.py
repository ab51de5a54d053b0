"""Checkpoints: any layout and mesh to any other, to the bit; replaced at once or not at all; errors on all ranks."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_tensors import mesh_of, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dshard import DTensor, Layout, Mesh, Replicate, Shard, distribute_tensor, parallelize
from dshard.checkpoint import load, save
from dshard.checkpoint.store import absent_prefixes
from dshard.testing import RankPool, distribute, layouts, rank_pool, shapes, whole


def laid(x: Tensor, layout: Layout) -> DTensor:
    """`x`, which every rank has, on this rank's mesh of the layout."""
    mesh_of(*layout.mesh.shape)
    mesh = DTensor.from_local(torch.zeros(()), mesh_of(*layout.mesh.shape), shape=()).layout.mesh
    return distribute(x, Layout(mesh, layout.placements, layout.order))


WAIT = 300.0
"""Seconds that the ranks get where torch, making its first optimizer, imports half of itself."""


# -- any layout to any other

MESHES = [Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((4, 1), ("x", "y")), Mesh((1, 2, 2), ("x", "y", "z"))]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


Case = tuple[tuple[int, ...], torch.dtype, Layout, Layout]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shape, dtype, the layout to save from and the one to load to, on meshes of their own."""
    shape = draw(shapes(max_dims=3))
    one = st.sampled_from(MESHES).flatmap(lambda mesh: layouts(mesh, len(shape), partial=()))
    return shape, draw(st.sampled_from(DTYPES)), draw(one), draw(one)


def moved(many: list[Case], path: str) -> list[bool]:
    """Whether each tensor, all in one checkpoint, arrives."""
    save({str(i): laid(numbers(shape, dtype), src) for i, (shape, dtype, src, _) in enumerate(many)}, path)
    found = {str(i): laid(torch.zeros(shape, dtype=dtype), dst) for i, (shape, dtype, _, dst) in enumerate(many)}
    load(found, path)
    return [torch.equal(whole(found[str(i)]), numbers(*case[:2])) for i, case in enumerate(many)]


@pytest.mark.ranks
@settings(max_examples=3)
@given(st.lists(cases(), min_size=6, max_size=10))
def test_any_layout_loads_what_any_other_saved(ranks: RankPool, many: list[Case]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(moved, many, f"{folder}/x") == [[True] * len(many)] * 4


@given(st.sampled_from(MESHES), shapes(max_dims=3), st.data())
def test_the_parts_of_all_ranks_cover_a_tensor_once(mesh: Mesh, shape: tuple[int, ...], data: st.DataObject) -> None:
    layout = data.draw(layouts(mesh, len(shape), partial=()))
    counted = torch.zeros(shape, dtype=torch.int64)
    for box in {layout.region(shape, at) for at in mesh.coordinates()}:
        counted[tuple(slice(held.start, held.stop) for held in box)] += 1

    assert torch.equal(counted, torch.ones_like(counted))


# -- models and optimizers between the strategies of the papers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).relu()))


LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, list[Any]]]] = {
    "optimus": (
        (2, 2),
        {"weight": [Shard(1), Shard(0)], "bias": [Replicate(), Shard(0)], "norm.weight": [Shard(0)] * 2},
    ),
    "megatron": ((4,), {"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]}),
    "tesseract": (
        (2, 2, 2),
        {"weight": [Replicate(), Shard(1), Shard(0)], "bias": [Shard(0)] * 3, "norm.weight": [Replicate()] * 3},
    ),
    "fsdp": ((2, 2), {"weight": [Shard(0), Shard(0)], "bias": [Shard(0), Shard(0)]}),
    "alone": ((1,), {}),
}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def trained(layout: str, optimizer: str, steps: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    shape, placements = LAYOUTS[layout]
    torch.manual_seed(seed)
    net, mesh = Net(), mesh_of(*shape)
    for path, module in net.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            wanted = placements.get(f"{path}.{name}", placements.get(name, [Replicate()] * len(shape)))
            module.register_parameter(name, distribute_tensor(parameter, mesh, wanted))
    made = OPTIMIZERS[optimizer](net.parameters())
    for _ in range(steps):
        net(distribute_tensor(numbers((4, 6)), mesh, [Replicate()] * len(shape))).square().sum().backward()
        made.step()
        made.zero_grad()
    return net, made


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that training goes on from, whole."""
    found = {name: whole(p.detach()) for name, p in net.named_parameters()}
    for i, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found[f"{i}.{name}"] = whole(value) if isinstance(value, DTensor) else value
    return found | {"groups": optimizer.state_dict()["param_groups"]}


def save_trained(layout: str, optimizer: str, path: str) -> dict[str, Any]:
    net, made = trained(layout, optimizer, 3)
    save({"model": net, "optimizer": made, "step": 3, "note": {"seen": [1, 2]}}, path)
    return values(net, made)


def load_trained(layout: str, optimizer: str, path: str) -> dict[str, Any]:
    if dist.get_rank() >= torch.Size(LAYOUTS[layout][0]).numel():
        return {}
    net, made = trained(layout, optimizer, 0, seed=1)
    state: dict[str, Any] = {"model": net, "optimizer": made, "step": 0, "note": {"seen": []}}
    load(state, path)
    assert state["step"] == 3
    assert state["note"] == {"seen": [1, 2]}
    return values(net, made)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.thorough)])
def test_a_model_saved_on_a_grid_loads_under_other_strategies_to_the_bit(
    ranks: RankPool, optimizer: str, tmp_path: Path
) -> None:
    saved = ranks.run(save_trained, "optimus", optimizer, str(tmp_path / "model"), timeout=WAIT)[0]

    for layout in ("megatron", "fsdp"):
        for found in ranks.run(load_trained, layout, optimizer, str(tmp_path / "model")):
            assert saved.keys() == found.keys()
            assert all(same(saved[name], found[name]) for name in saved)


def load_alone(optimizer: str, path: str) -> dict[str, Any]:
    """On one device, without a process group: plain tensors."""
    net = Net()
    made = OPTIMIZERS[optimizer](net.parameters())
    load({"model": net, "optimizer": made}, path)
    found: dict[str, Any] = {name: p.detach() for name, p in net.named_parameters()}
    for i, state in made.state_dict()["state"].items():
        found |= {f"{i}.{name}": value for name, value in state.items()}
    return found | {"groups": made.state_dict()["param_groups"]}


@pytest.mark.ranks
def test_one_device_loads_what_a_grid_saved(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(save_trained, "optimus", "adamw", str(tmp_path / "model"), timeout=WAIT)[0]

    found = load_alone("adamw", str(tmp_path / "model"))

    assert saved.keys() == found.keys()
    assert all(same(saved[name], found[name]) for name in saved)


@pytest.mark.thorough
@pytest.mark.ranks
def test_eight_ranks_load_what_four_saved(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(save_trained, "optimus", "adamw", str(tmp_path / "model"), timeout=WAIT)[0]

    for found in rank_pool(8).run(load_trained, "tesseract", "adamw", str(tmp_path / "model"), timeout=WAIT):
        assert saved.keys() == found.keys()
        assert all(same(saved[name], found[name]) for name in saved)


def goes_on(path: str) -> bool:
    """Three steps, a checkpoint and three more are six."""
    net, optimizer = trained("optimus", "adamw", 3)
    save({"model": net, "optimizer": optimizer}, path)
    again, restarted = trained("fsdp", "adamw", 0, seed=1)
    load({"model": again, "optimizer": restarted}, path)
    for model, made in ((net, optimizer), (again, restarted)):
        mesh = next(model.parameters()).device_mesh
        for _ in range(3):
            model(distribute_tensor(numbers((4, 6)), mesh, [Replicate()] * mesh.ndim)).square().sum().backward()
            made.step()
            made.zero_grad()
    return all(
        torch.allclose(whole(a.detach()), whole(b.detach()), rtol=1e-5, atol=1e-6)
        for a, b in zip(net.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.ranks
def test_training_goes_on_from_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    assert all(ranks.run(goes_on, str(tmp_path / "model"), timeout=WAIT))


# -- torch's own save and load


class WithUnusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.unused = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 7)

    def forward(self, x: Tensor, used: bool = False) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h).sum() + (self.unused(h).square().sum() if used else 0)


def resumed_with_an_unused_head(path: str, warm: bool) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Parameters after steps before and after a checkpoint, and without one; what is warned of."""
    x = torch.ones(4, 6)

    def begun(uses: list[bool], plan: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = parallelize(WithUnusedHead(), mesh_of(4), plan, x)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        stepped(model, optimizer, uses)
        return model, optimizer

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, uses: list[bool]) -> None:
        for used in uses:
            optimizer.zero_grad()
            model(x, used).backward()
            optimizer.step()

    before = [True, False] if warm else [False, False]
    model, optimizer = begun(before, "data")
    save({"model": model, "optimizer": optimizer}, path)
    stepped(model, optimizer, [True, True])
    other, resumed = begun([False] if warm else [], "fsdp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load({"model": other, "optimizer": resumed}, path)
    stepped(other, resumed, [True, True])
    of_states = [str(each.message) for each in caught if "state of an optimizer" in str(each.message)]
    return [whole(p).detach() for p in other.parameters()], [whole(p).detach() for p in model.parameters()], of_states


@pytest.mark.ranks
def test_states_that_a_checkpoint_lacks_begin_anew_with_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    for resumed, went_on, warned in ranks.run(resumed_with_an_unused_head, str(tmp_path / "c"), False, timeout=WAIT):
        torch.testing.assert_close(resumed, went_on)
        assert len(warned) == 1
        assert "for 2 parameters (optimizer: unused.weight, optimizer: unused.bias), which had no grad" in warned[0]


@pytest.mark.ranks
def test_states_that_an_optimizer_lacks_are_loaded(ranks: RankPool, tmp_path: Path) -> None:
    for resumed, went_on, warned in ranks.run(resumed_with_an_unused_head, str(tmp_path / "c"), True, timeout=WAIT):
        torch.testing.assert_close(resumed, went_on)
        assert not warned


def test_states_that_a_checkpoint_lacks_are_found_in_one_pass_over_its_names() -> None:
    states = [f"optimizer.state.{i}." for i in range(4000)]
    names = [f"{state}{name}" for state in states[1:] for name in ("step", "exp_avg.0", "exp_avg_sq")]
    begin = perf_counter()
    assert absent_prefixes(states, names) == states[:1]
    assert perf_counter() - begin < 2  # not each state with each name, which takes several times as long


def with_torch(path: str) -> tuple[bool, bool]:
    x = numbers((5, 7))
    placed = distribute_tensor(x, mesh_of(2, 2), [Shard(0), Shard(0)])
    dcp.save({"a": {"x": placed}}, checkpoint_id=path)
    found = distribute_tensor(torch.zeros_like(x), mesh_of(4), [Shard(1)])
    dcp.load({"a": {"x": found}}, checkpoint_id=path)
    ours = distribute_tensor(torch.zeros_like(x), mesh_of(2, 2), [Replicate(), Shard(1)])
    load({"a": {"x": ours}}, path)
    return torch.equal(whole(found), x), torch.equal(whole(ours), x)


@pytest.mark.ranks
def test_torch_saves_and_loads_distributed_tensors_as_they_are(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(with_torch, str(tmp_path / "x")) == [(True, True)] * 4


def with_torchs_state_dicts(path: str) -> bool:
    """torch's own functions for the states of models and optimizers, saved while training would go on."""
    net, optimizer = trained("optimus", "adamw", 2)
    model, made = get_state_dict(net, optimizer)
    dcp.async_save({"model": model, "made": made}, checkpoint_id=path, process_group=group_of_all()).result()
    again, fresh = trained("fsdp", "adamw", 0, seed=1)
    model, made = get_state_dict(again, fresh)
    dcp.load({"model": model, "made": made}, checkpoint_id=path)
    set_state_dict(again, fresh, model_state_dict=model, optim_state_dict=made)
    saved, found = values(net, optimizer), values(again, fresh)
    return all(same(saved[name], found[name]) for name in saved if name != "groups")


@functools.cache
def group_of_all() -> Any:
    return dist.new_group(backend="gloo")


@pytest.mark.ranks
def test_torchs_state_dicts_and_async_save_take_distributed_tensors(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(with_torchs_state_dicts, str(tmp_path / "x"), timeout=WAIT) == [True] * 4
