"""Files of `torch.save`: plain where a rank has whole tensors, and told of where it has parts; `load_state_dict`."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
import warnings
from functools import cache
from itertools import product
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard import CheckpointError, DTensor, Replicate, distribute_tensor, parallelize
from dshard.checkpoint import load
from dshard.testing import RankPool

MESHES = {"data": (4,), "fsdp": (4,), "fsdp x megatron": (2, 2)}
TOKENS = torch.arange(8)


class Net(nn.Module):
    """Tied weights, buffers of all kinds, a frozen parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.tokens, self.norm, self.inner = nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("turned", torch.rand(3, 4).t())
        self.register_buffer("empty", torch.empty(0, 2))
        self.register_buffer("brief", torch.rand(3).bfloat16())
        self.register_buffer("count", torch.tensor(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.tokens(tokens))).relu())  # type: ignore[no-any-return]


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    return dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def trained(strategy: str | None, steps: int, tied: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(tied).double()
    model.brief = model.brief.bfloat16()
    if strategy is not None:
        parallelize(model, mesh_of(MESHES[strategy]), strategy, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)
    losses(model, optimizer, steps)
    return model, optimizer


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    out = []
    with dshard.implicit_replication():
        for _ in range(steps):
            loss = F.cross_entropy(model(TOKENS), (TOKENS + 1) % 10)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
    return out


def local(x: Any) -> Any:
    """`x` with plain tensors of the same memory in place of distributed ones."""
    if isinstance(x, DTensor):
        plain: Any = x.to_local().detach()
        return nn.Parameter(plain, x.requires_grad) if isinstance(x, nn.Parameter) else plain
    if isinstance(x, dict):
        return type(x)((key, local(value)) for key, value in x.items())
    return [*map(local, x)] if isinstance(x, list) else x


# -- what rank 0 writes

SAVES = """
for zipped in (True, False):
    torch.save(held, f"{path}.{zipped}", _use_new_zipfile_serialization=zipped)
"""


def saved_by_first_rank(strategy: str, path: str, is_expected: bool) -> list[str]:
    """The warnings of rank 0, which alone saves the states twice, from one line."""
    model, optimizer = trained(strategy, 2, tied=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if dist.get_rank() == 0:
            held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": list(model.parameters())}
            exec(compile(SAVES, path, "exec"), {"torch": torch, "held": held, "path": path})
            if is_expected:
                torch.save(local(held), f"{path}.expected")
    return [str(each.message) for each in caught if "torch.save" in str(each.message)]


IN_PLAIN_TORCH = """
import sys, torch

def traits(x):
    storage = x.untyped_storage()
    return type(x), x.dtype, x.shape, x.stride(), x.storage_offset(), x.requires_grad, storage.nbytes()

def same(x, y):
    if isinstance(x, torch.Tensor):
        assert traits(x) == traits(y), (traits(x), traits(y))
        assert torch.equal(x, y)
    elif isinstance(x, (dict, list)):
        assert len(x) == len(y)
        for key in x if isinstance(x, dict) else range(len(x)):
            same(x[key], y[key])
    else:
        assert x == y

expected = torch.load(sys.argv[1] + ".expected", weights_only=True)
for zipped in (True, False):
    found = torch.load(f"{sys.argv[1]}.{zipped}", weights_only=True)
    same(found, expected)
    tied = found["model"]["tokens.weight"], found["model"]["head.weight"], found["list"][1]
    assert len({x.data_ptr() for x in tied}) == 1
    assert isinstance(found["list"][1], torch.nn.Parameter)
assert "dshard" not in sys.modules
"""


@pytest.mark.ranks
def test_a_state_saved_by_one_rank_under_data_is_one_of_plain_torch(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(saved_by_first_rank, "data", str(tmp_path / "x"), True) == [[]] * 4
    command = [sys.executable, "-c", IN_PLAIN_TORCH, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def written_as_told(lines: list[str], path: str) -> bool:
    """Whether the lines of the warning, which all ranks call, write a checkpoint, and a file of plain tensors."""
    model, optimizer = trained("fsdp", 2)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "path": path + "_folder"}
    for line in lines:
        exec(line, names)
    if dist.get_rank() == 0:
        torch.save(names["state"], path)
    dist.barrier()
    expected = {k: v.full_tensor() for k, v in model.state_dict().items() if isinstance(v, DTensor)}
    state = torch.load(path)
    again, fresh = trained("fsdp x megatron", 0)
    load({"model": again, "optimizer": fresh}, path + "_folder")
    loaded = {k: v.full_tensor() for k, v in again.state_dict().items() if isinstance(v, DTensor)}
    return all(torch.equal(state[k], v) and torch.equal(loaded[k], v) for k, v in expected.items())


@pytest.mark.ranks
def test_parts_are_written_with_a_warning_that_names_the_lines_to_write(ranks: RankPool, tmp_path: Path) -> None:
    for strategy in ("fsdp", "fsdp x megatron"):
        [message], *others = ranks.run(saved_by_first_rank, strategy, str(tmp_path / strategy), False)
        assert others == [[]] * 3
        assert re.match(
            r"torch.save writes what rank 0 holds, a local tensor of shape \([12],\) of a tensor of shape", message
        )
    lines = [line.strip() for line in message.splitlines() if line.startswith("    ")]
    assert ranks.run(written_as_told, lines, str(tmp_path / "told")) == [True] * 4
    with pytest.raises(CheckpointError, match=r"holds what rank 0 had of .* what 3 other ranks had is missing"):
        torch.load(tmp_path / "fsdp.True")
    assert ranks.run(read_by_others, str(tmp_path / "fsdp.True")) == ["", *["what 3 other ranks had is missing"] * 3]


def read_by_others(path: str) -> str:
    mesh_of((4,))
    try:
        state = torch.load(path)["model"]
    except CheckpointError as error:
        return "what 3 other ranks had is missing" * ("what 3 other ranks had is missing" in str(error))
    return "" if isinstance(state["frozen"], DTensor) else "plain"


# -- what else pickles


def elsewhere(path: str) -> list[str]:
    """Ways of copying and sending, whose results are not the same distributed tensors."""
    x: Any = nn.Parameter(distribute_tensor(torch.rand(4, 3), mesh_of((2, 2)), [Replicate(), Replicate()]))
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, x)
    held = {"pair": (x.detach(), 1)}
    dcp.save(held, checkpoint_id=path)
    read: dict[str, Any] = {"pair": None}
    dcp.load(read, checkpoint_id=path, planner=dcp.DefaultLoadPlanner())
    ways = {
        "copy": copy.copy(x),
        "deepcopy": copy.deepcopy(x),
        "pickle": pickle.loads(pickle.dumps(x)),
        "queue": pickle.loads(bytes(ForkingPickler.dumps(x))),
        "all_gather_object": gathered[3],
        "torch's checkpoint": read["pair"][0],
    }
    return [name for name, y in ways.items() if not isinstance(y, DTensor) or y.layout != x.layout]


@pytest.mark.ranks
def test_copies_queues_and_checkpoints_get_distributed_tensors(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(elsewhere, str(tmp_path / "x")) == [[]] * 4


def saved_outside(path: str) -> list[str]:
    """A rank outside the mesh has nothing to write, and a mesh of one rank all of it."""
    rank = dist.get_rank()
    pair = dshard.DeviceMesh("cpu", [0, 1])
    x = distribute_tensor(torch.arange(4.0), pair, [Replicate()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.save({"x": x}, f"{path}{rank}")
    alone = distribute_tensor(torch.arange(4.0), mesh_of((2, 2)), [Replicate(), Replicate()])[rank:]
    buffer = io.BytesIO()
    torch.save(alone, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer)) is Tensor
    return [str(each.message).partition(" of a tensor")[0] for each in caught]


@pytest.mark.ranks
def test_a_rank_outside_the_mesh_warns_that_it_writes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(saved_outside, str(tmp_path / "x"))
    assert found == [[], [], *[[f"torch.save writes what rank {rank} holds, nothing"] for rank in (2, 3)]]
    assert torch.equal(torch.load(tmp_path / "x0")["x"], torch.arange(4.0))


# -- what is loaded


TARGETS = ("fsdp x megatron", None, "data")


def loaded_in_every_mix(every: int) -> list[str]:
    """Loads of states of three layouts, of one device and of a mix, after which training does not go on as on it."""
    model, optimizer = trained(None, 3)
    states = {None: copy.deepcopy((model.state_dict(), optimizer.state_dict()))}
    expected, wrong = losses(model, optimizer, 2), []
    for strategy in ("fsdp", "fsdp x megatron"):
        each = trained(strategy, 3)
        states[strategy] = copy.deepcopy((each[0].state_dict(), each[1].state_dict()))  # type: ignore[index]
    sources: list[Any] = [*states]
    mixed = copy.deepcopy(states[None])
    for i, name in enumerate(mixed[0]):
        mixed[0][name] = states[sources[i % 3]][0][name]
    for i, values in mixed[1]["state"].items():
        for j, name in enumerate(values):
            values[name] = states[sources[(i + j) % 3]][1]["state"][i][name]
    states["mixed"] = mixed  # type: ignore[index]
    for (source, (of_model, of_optimizer)), target in [*product(states.items(), TARGETS)][::every]:
        model, optimizer = trained(target, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
        layouts = [getattr(p, "layout", None) for p in model.parameters()]
        model.load_state_dict(of_model, strict=source is None)
        optimizer.load_state_dict(copy.deepcopy(of_optimizer))
        found = losses(model, optimizer, 2)
        of_states = [
            getattr(value, "layout", None)
            for p, state in optimizer.state.items()
            for value in state.values()
            if value.dim() and getattr(value, "layout", None) != getattr(p, "layout", None)
        ]
        if [getattr(p, "layout", None) for p in model.parameters()] != layouts or of_states:
            wrong.append(f"{source} -> {target}: other layouts {of_states[:2]}")
        if found != pytest.approx(expected, rel=1e-9):
            wrong.append(f"{source} -> {target}: {found}, not {expected}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.thorough)])
def test_states_of_any_layout_are_loaded_into_any_other(ranks: RankPool, every: int) -> None:
    assert ranks.run(loaded_in_every_mix, every, timeout=120.0) == [[]] * 4


def test_safetensors_is_refused_with_the_lines_to_write(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    mesh, path = dshard.init_device_mesh("cpu", (1,), mesh_dim_names=("x",)), tmp_path / "file"
    model = parallelize(nn.Linear(4, 4), mesh, "fsdp", torch.ones(4, 4))
    torch_files.save_file(nn.Linear(4, 4).state_dict(), path)
    for call in (
        lambda: torch_files.save_file(model.state_dict(), tmp_path / "other"),
        lambda: torch_files.save_model(model, tmp_path / "other"),
        lambda: torch_files.load_model(model, path),
    ):
        with pytest.raises(
            CheckpointError, match=r"\(4, 4\) is laid out \[x:S\(0\)\].*dshard.checkpoint.save_safetensors"
        ):
            call()
    assert not (tmp_path / "other").exists()


# -- what autograd saves in files


def gradients_by_files(strategy: str | None) -> list[Tensor]:
    """The gradients of a step whose hooks of saved tensors keep these in files, as torch's tutorial has them."""
    model, _ = trained(strategy, 0)

    def in_file(x: Tensor) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(x, file)
        return file

    def of_file(file: io.BytesIO) -> Any:
        file.seek(0)
        return torch.load(file, weights_only=False)

    with torch.autograd.graph.saved_tensors_hooks(in_file, of_file):
        loss = F.cross_entropy(model(TOKENS), (TOKENS + 1) % 10)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]


@pytest.mark.parametrize("strategy", MESHES)
def test_hooks_of_saved_tensors_may_write_files(strategy: str, ranks: RankPool) -> None:
    of_ranks, expected = ranks.run(gradients_by_files, strategy)[0], ranks.run(gradients_by_files, None)[0]

    for found, right in zip(of_ranks, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
