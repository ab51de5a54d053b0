"""Checkpoints that fail, whole or in part; what is written once; progress; safetensors."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_tensors import mesh_of, numbers
from torch import Tensor

from dshard import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor
from dshard.checkpoint import load, load_safetensors, save, save_safetensors
from dshard.errors import CheckpointError, RankError
from dshard.layout import layout_of
from dshard.report import checkpoint_progress
from dshard.testing import RankPool, distribute, whole


def saved_bytes(path: str, placements: list[Any]) -> int:
    save({"x": distribute_tensor(torch.ones(1 << 16), mesh_of(2, 2), placements)}, path)
    return sum(file.stat().st_size for file in Path(path).iterdir())


@pytest.mark.ranks
def test_replicas_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    for i, placements in enumerate(([Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(0)])):
        nbytes = ranks.run(saved_bytes, str(tmp_path / str(i)), placements)[0]

        assert 4 << 16 <= nbytes < 5 << 16


def save_partial(path: str) -> tuple[bool, str]:
    x = numbers((4, 3))
    term = distribute(x, layout_of(as_pure(mesh_of(2, 2)), [Partial(), Shard(0)], 2))
    save({"x": term}, path)
    found = distribute_tensor(torch.zeros_like(x), mesh_of(4), [Shard(0)])
    load({"x": found}, path)
    try:
        dcp.save({"x": term}, checkpoint_id=path + "-torch")
    except BaseException as error:
        return torch.equal(whole(found), x), str(error)
    return False, ""


def as_pure(mesh: Any) -> Mesh:
    return DTensor.from_local(torch.zeros(()), mesh, shape=()).layout.mesh


@pytest.mark.ranks
def test_partial_tensors_are_completed_or_refused(ranks: RankPool, tmp_path: Path) -> None:
    for is_same, message in ranks.run(save_partial, str(tmp_path / "x")):
        assert is_same
        assert "is partial, and a checkpoint holds values: redistribute it" in message


# -- a crash leaves what was there before


def save_two(path: str, then: str, victim: int) -> None:
    x = distribute_tensor(numbers((64, 8)), mesh_of(2), [Shard(0)])
    save({"x": x}, path)

    def die(done: int, total: int) -> None:
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        save({"x": x + 1}, path, progress=die)
    except CheckpointError as error:
        Path(then, str(dist.get_rank())).write_text(str(error))
        raise


def load_one(path: str) -> Tensor:
    x = distribute_tensor(torch.zeros(64, 8), mesh_of(2), [Shard(0)])
    load({"x": x}, path)
    save({"x": x + 2}, path)
    load({"x": x}, path)
    return whole(x) - 2


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_rank_leaves_the_earlier_checkpoint_and_the_others_raise(victim: int, tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    with RankPool(2, timeout=120) as pool:
        with pytest.raises(RankError, match=rf"rank {victim} exited with code -9 \(SIGKILL\)"):
            pool.run(save_two, path, str(tmp_path), victim)
        survivor = (tmp_path / str(1 - victim)).read_text()

        assert survivor.startswith(f"saving to {path}: what was there before stays as it was")
        assert all(torch.equal(found, numbers((64, 8))) for found in pool.run(load_one, path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["model", str(1 - victim)])
    assert len(list((tmp_path / "model").iterdir())) == 3  # metadata, and data of two ranks


def save_failing(path: str) -> str:
    x = distribute_tensor(numbers((4, 4)), mesh_of(4), [Shard(0)])
    save({"x": x}, path)

    def fail(done: int, total: int) -> None:
        if dist.get_rank() == 2:
            raise OSError("no space left on device")

    try:
        save({"x": x + 1}, path, progress=fail)
    except CheckpointError as error:
        load({"x": x}, path)
        return f"{error} {torch.equal(whole(x), numbers((4, 4)))}"
    return ""


@pytest.mark.ranks
def test_a_failing_rank_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(save_failing, str(tmp_path / "x")):
        assert "rank 2: OSError: no space left on device" in found
        assert found.endswith("True")


# -- errors


def refused(path: str, what: str) -> str:
    x = distribute_tensor(numbers((8, 4)), mesh_of(4), [Shard(0)])
    save({"x": x, "n": 1}, path)
    dist.barrier()
    if dist.get_rank() == 0:
        data = sorted(Path(path).glob("*.distcp"))
        match what:
            case "damaged data":
                data[-1].write_bytes(data[-1].read_bytes()[:40])
            case "missing data":
                data[-1].unlink()
            case "damaged metadata":
                Path(path, ".metadata").write_bytes(b"nothing")
            case "missing metadata":
                Path(path, ".metadata").unlink()
    dist.barrier()
    states: dict[str, dict[str, Any]] = {
        "name": {"y": x},
        "shape": {"x": distribute_tensor(numbers((4, 8)), mesh_of(4), [Shard(0)])},
        "dtype": {"x": x.double()},
        "kind": {"n": x},
        "partial": {"x": distribute(numbers((8, 4)), layout_of(as_pure(mesh_of(4)), [Partial()], 2))},
    }
    try:
        load(states.get(what, {"x": x}), path)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("name", "it has no 'y'; it has n x"),
        ("shape", "'x' has shape (8, 4) in the checkpoint and (4, 8) here"),
        ("dtype", "'x' is torch.float32 in the checkpoint and torch.float64 here: load it as it was saved"),
        ("kind", "'n' is another value in the checkpoint and a tensor here"),
        ("partial", "a partial tensor cannot be loaded: use Shard or Replicate"),
        ("damaged data", "rank "),
        ("missing data", "rank "),
        ("damaged metadata", "its file .metadata cannot be read"),
        ("missing metadata", "is no checkpoint: it has no file .metadata"),
    ],
)
def test_errors_are_alike_on_all_ranks(ranks: RankPool, what: str, message: str, tmp_path: Path) -> None:
    found = ranks.run(refused, str(tmp_path / "x"), what)

    assert message in found[0]
    assert found == [found[0]] * 4


def test_a_state_that_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"two values of the state are called 'a\.b'"):
        save({"a": {"b": 1}, "a.b": 2}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="does not exist; give the directory that a checkpoint was saved to"):
        load({"a": 1}, tmp_path / "nothing")


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    saved: list[tuple[int, int]] = []
    loaded: list[tuple[int, int]] = []
    state = {"x": numbers((8, 4)), "y": numbers((3,), torch.float64), "n": 1}

    save(state, tmp_path / "x", progress=lambda *told: saved.append(told))
    with checkpoint_progress(visible=False) as move:
        load(state, tmp_path / "x", progress=lambda *told: (loaded.append(told), move(*told)))

    nbytes = 8 * 4 * 4 + 3 * 8
    assert saved[-1] == loaded[-1] == (nbytes, nbytes)
    assert loaded == sorted(loaded)


# -- safetensors


def through_safetensors(path: str, dtype: torch.dtype) -> list[Any]:
    save_file = pytest.importorskip("safetensors.torch").save_file
    whole_state = {
        name: numbers(shape, dtype) for name, shape in {"a": (5, 6), "b": (7,), "c": (), "d": (0, 3)}.items()
    }
    if dist.get_rank() == 0:
        save_file(whole_state, path + ".safetensors")
    dist.barrier()
    placements: dict[str, list[Any]] = {"a": [Shard(1), Shard(0)], "b": [Shard(0), Shard(0)]}
    target = {
        name: distribute_tensor(torch.zeros_like(x), mesh_of(2, 2), placements.get(name, [Replicate()] * 2))
        for name, x in whole_state.items()
    }
    nbytes = load_safetensors(target, path + ".safetensors")
    held = sum(x.to_local().nbytes for x in target.values())
    save_safetensors({"inner": target, "step": 3}, path + "-ours.safetensors")
    same_ = [torch.equal(whole(target[name]), x) for name, x in whole_state.items()]
    return [nbytes == held, all(same_)]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_safetensors_are_read_and_written_in_parts(ranks: RankPool, dtype: torch.dtype, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file

    assert ranks.run(through_safetensors, str(tmp_path / "x"), dtype) == [[True, True]] * 4

    theirs, ours = load_file(tmp_path / "x.safetensors"), load_file(tmp_path / "x-ours.safetensors")
    assert {f"inner.{name}" for name in theirs} == ours.keys()
    for name, x in theirs.items():
        assert torch.equal(ours[f"inner.{name}"], x)
        assert ours[f"inner.{name}"].dtype == dtype


def test_safetensors_of_several_files_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    save_safetensors({"a": numbers((2, 3))}, tmp_path / "one.safetensors")
    save_safetensors({"b": numbers((4,), torch.bfloat16)}, tmp_path / "two.safetensors")
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}

    assert load_safetensors(state, tmp_path) == 2 * 3 * 4 + 4 * 2

    assert torch.equal(state["a"], numbers((2, 3)))
    assert torch.equal(state["b"], numbers((4,)))
    with pytest.raises(CheckpointError, match=r"'a' has shape \(2, 3\) in the file and \(3, 2\) here"):
        load_safetensors({"a": torch.zeros(3, 2)}, tmp_path)
    with pytest.raises(CheckpointError, match="it has no 'c'; it has a b"):
        load_safetensors({"c": torch.zeros(3, 2)}, tmp_path)
    (tmp_path / "two.safetensors").write_bytes(b"nothing at all")
    with pytest.raises(CheckpointError, match=r"two\.safetensors cannot be read"):
        load_safetensors(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"'x' is torch\.complex64, which the format does not have"):
        save_safetensors({"x": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "x.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dshard\[safetensors\]'"):
        load_safetensors(state, tmp_path)
