"""Files of checkpoints: what a save replaces and what it leaves, damaged bytes, full disks, loads during saves."""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_tensors import mesh_of, numbers

from dshard import Shard, distribute_tensor
from dshard.checkpoint import load, metadata_file, save, save_safetensors, storage
from dshard.errors import CheckpointError
from dshard.testing import RankPool, whole


def error_of(function: Callable[[], object]) -> str:
    """What a CheckpointError says; nothing if there is none."""
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return ""


def contents(path: Path) -> dict[str, bytes]:
    """All files in a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def loaded(path: Any, *names: str, size: int = 3) -> list[float]:
    """The first element of each tensor of a checkpoint."""
    state = {name: torch.zeros(size) for name in names or ("x",)}
    load(state, path)
    return [x[0].item() for x in state.values()]


# -- what a save may replace


def test_a_save_refuses_what_is_no_checkpoint_and_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("a year of work")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".metadata").write_text("of another program")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__0_0.distcp").write_text("data without metadata, which may be being written")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "to-file").symlink_to("file")
    before = contents(tmp_path)
    for name, message in {
        "work": r"it is no checkpoint and not empty, it holds thesis\.tex: give a new or an empty directory",
        "other": r"not empty, it holds \.metadata",
        "broken": r"not empty, it holds __0_0\.distcp",
        "file": "it is a file, and a checkpoint is a directory",
        "file/below": "NotADirectoryError",
        "link": "it is a link to nowhere, which does not exist",
        "to-file": "it is a file",
        "": r"not empty, it holds broken file link other and 2 more",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            save({"x": numbers((3,))}, tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot save to s3://bucket/x: give a path of a file system"):
        save({"x": numbers((3,))}, "s3://bucket/x")
    with pytest.raises(CheckpointError, match="it is a directory, and this writes a file"):
        save_safetensors({"x": numbers((3,))}, tmp_path / "work")

    assert contents(tmp_path) == before
    assert not Path("s3:").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_replaces_a_checkpoint_and_keeps_other_files(tmp_path: Path) -> None:
    dcp.save({"x": numbers((3,))}, checkpoint_id=tmp_path / "real")
    (tmp_path / "real" / "notes.txt").write_text("mine")
    (tmp_path / "real" / "plots").mkdir()
    (tmp_path / "real" / "plots" / "loss.csv").write_text("mine, too")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "empty").mkdir()

    save({"x": numbers((3,)) + 1}, tmp_path / "link")
    save({"x": numbers((3,)) + 2}, tmp_path / "link")
    save({"x": numbers((3,)) + 3}, tmp_path / "empty")
    save({"x": numbers((3,)) + 4}, tmp_path / "new" / "below")

    assert (tmp_path / "link").is_symlink()
    assert loaded(tmp_path / "real") == [3]
    assert loaded(tmp_path / "empty") == [4]
    assert loaded(tmp_path / "new" / "below") == [5]
    files = contents(tmp_path / "real")
    assert files.pop("notes.txt") == b"mine"
    assert files.pop("plots/loss.csv") == b"mine, too"
    assert len(files) == 2  # metadata and data of the last save alone


def at_different_places(path: str) -> list[str]:
    rank, cwd = dist.get_rank(), os.getcwd()
    here = Path(path, f"cwd{rank % 2}")
    here.mkdir(exist_ok=True)
    x = {"x": distribute_tensor(numbers((8, 4)), mesh_of(4), [Shard(0)])}
    try:
        os.chdir(here)
        messages = [
            error_of(lambda: save(x, Path(path, f"of-{rank // 3}"))),
            error_of(lambda: save(x, "relative")),
            error_of(lambda: save_safetensors(x, f"{path}/of-{rank // 3}.safetensors")),
            error_of(lambda: load(x, f"{path}/of-{rank // 3}")),
            error_of(lambda: save(x, path)),
        ]
    finally:
        os.chdir(cwd)
    return messages


@pytest.mark.ranks
def test_different_paths_are_refused_on_all_ranks_before_anything_is_written(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(at_different_places, str(tmp_path))

    assert found == [found[0]] * 4
    places, relative, file, source, occupied = found[0]
    assert places.startswith(
        f"cannot save to different paths: rank 0 gives {tmp_path}/of-0 and rank 3 gives {tmp_path}/of-1; give one path"
    )
    assert f"rank 0 gives {tmp_path}/cwd0/relative and rank 1 gives {tmp_path}/cwd1/relative" in relative
    assert f"rank 0 gives {tmp_path}/of-0.safetensors and rank 3 gives {tmp_path}/of-1.safetensors" in file
    assert source.startswith("cannot load from different paths")
    assert "it is no checkpoint and not empty, it holds cwd0 cwd1" in occupied
    assert contents(tmp_path) == {}


# -- damage


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


def test_a_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    state = {"weight": numbers((7, 5)), "bias": numbers((3,), torch.bfloat16), "step": 3}
    save(state, tmp_path)
    infos = metadata_file.read(tmp_path).storage_data
    for index, info in infos.items():
        file = tmp_path / info.relative_path
        data = file.read_bytes()
        for at in [*range(info.offset, info.offset + info.length, 113), info.offset + info.length - 1]:
            file.write_bytes(flipped(data, at))
            message = error_of(lambda: load(state, tmp_path))
            file.write_bytes(data)

            place = f"bytes {info.offset} to {info.offset + info.length} of {file.name}"
            assert f"{index.fqn!r} is damaged: {place} do not have the checksum that they were written with" in message
    load(state, tmp_path)
    assert {index.fqn for index in infos} == state.keys()


def test_a_flipped_byte_of_the_metadata_is_found(tmp_path: Path) -> None:
    save({"x": numbers((3,)), "n": 1}, tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    ends = range(len(data) - 40, len(data))
    for damaged in [
        *(flipped(data, at) for at in [*range(0, len(data), 5), *ends]),
        *(data[:end] for end in [0, *ends]),
    ]:
        (tmp_path / ".metadata").write_bytes(damaged)
        assert "its file .metadata" in error_of(lambda: metadata_file.read(tmp_path))
    assert "its file .metadata is damaged" in error_of(lambda: load({"n": 0}, tmp_path))
    save({"x": numbers((3,)) + 1}, tmp_path)  # a damaged checkpoint may be replaced
    assert loaded(tmp_path) == [2]


def damaged_on_one_rank(path: str) -> str:
    x = distribute_tensor(numbers((64, 8)), mesh_of(4), [Shard(0)])
    save({"x": x}, path)
    dist.barrier()
    if dist.get_rank() == 0:
        file = next(Path(path).glob("__2_*"))
        file.write_bytes(flipped(file.read_bytes(), 400))
    dist.barrier()
    return error_of(lambda: load({"x": x}, path))


@pytest.mark.ranks
def test_damage_that_one_rank_reads_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(damaged_on_one_rank, str(tmp_path / "x"))

    assert found == [found[0]] * 4
    assert found[0].startswith(f"loading from {tmp_path}/x\nrank 2: 'x' is damaged: bytes 0 to ")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_without_checksums_load(tmp_path: Path) -> None:
    dcp.save({"x": numbers((3,)), "n": 5}, checkpoint_id=tmp_path / "x")
    state = {"x": torch.zeros(3), "n": 0}

    load(state, tmp_path / "x")

    assert torch.equal(state["x"], numbers((3,)))
    assert state["n"] == 5


# -- what may be trusted


class Harmful:
    """Its pickle makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_loading_executes_nothing(tmp_path: Path) -> None:
    evidence = tmp_path / "executed"
    save({"n": 1}, tmp_path / "metadata")
    (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(Harmful(evidence)))
    save({"n": Harmful(evidence)}, tmp_path / "value")

    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: UnpicklingError: it names posix\.mkdir"):
        load({"n": 1}, tmp_path / "metadata")
    for current in (1, None, argparse.Namespace()):
        with pytest.raises(
            CheckpointError, match=r"'n' is not read, it was pickled with posix\.mkdir: .*\.add_safe_globals"
        ):
            load({"n": current}, tmp_path / "value")
    assert not evidence.exists()


def test_metadata_name_no_file_outside(tmp_path: Path) -> None:
    save({"x": numbers((3,))}, tmp_path / "x")
    metadata = metadata_file.read(tmp_path / "x")
    for name in ("/etc/passwd", "../x/y"):
        for info in metadata.storage_data.values():
            info.relative_path = name
        (tmp_path / "x" / ".metadata").write_bytes(metadata_file.as_bytes(metadata))
        with pytest.raises(CheckpointError, match=f"names the file {name}, outside of the checkpoint"):
            load({"x": numbers((3,))}, tmp_path / "x")


def test_metadata_of_python_3_13_is_read(tmp_path: Path) -> None:
    """Its pickles name the private module in which it has paths."""
    save({"x": numbers((3,))}, tmp_path / "x")
    metadata = metadata_file.read(tmp_path / "x")
    metadata.storage_meta.checkpoint_id = Path("x")  # type: ignore[union-attr]
    pickled = pickle.dumps(metadata, protocol=2)
    newer = pickled.replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")
    assert newer != pickled
    (tmp_path / "x" / ".metadata").write_bytes(newer + b"\ndshard crc32 %08x\n" % zlib.crc32(newer))
    x = torch.zeros(3)

    load({"x": x}, tmp_path / "x")

    assert x.equal(numbers((3,)))


def test_values_of_classes_that_the_state_has_are_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    state: dict[str, Any] = {
        "arguments": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "random": numpy.random.RandomState(3).get_state(),
        "note": {"text": "plain", "pair": (1, None), "empty": []},
    }
    save(state, tmp_path)
    found = {
        "arguments": argparse.Namespace(),
        "random": numpy.random.get_state(),
        "note": {"text": None, "pair": 0, "empty": 0},
    }

    load(found, tmp_path)

    assert found["arguments"] == state["arguments"]
    assert found["note"] == state["note"]
    assert numpy.array_equal(found["random"][1], state["random"][1])
    with pytest.raises(CheckpointError, match=r"'arguments' is not read, it was pickled with argparse\.Namespace"):
        load({"arguments": None}, tmp_path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        load(named := {"arguments": None}, tmp_path)
    assert named["arguments"] == state["arguments"]


# -- full disks


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL: list[tuple[Callable[..., None], int, str]] = [
    (save, 2, "former"),
    (save, 0, "former"),
    (save, 2, "new"),
    (save_safetensors, 2, "former.safetensors"),
]
"""What is saved, on which rank the disk is full, and the name."""


def save_on_a_full_disk(path: str) -> list[tuple[str, list[str], bool]]:
    """Errors, names left and whether the former checkpoint loads, where the system refuses the bytes of one rank."""
    big = distribute_tensor(torch.ones(1 << 16, 4), mesh_of(4), [Shard(0)])
    x = distribute_tensor(numbers((8, 4)), mesh_of(4), [Shard(0)])
    save({"x": x}, f"{path}/former")
    before = contents(Path(path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    results = []
    for function, victim, name in FULL:
        dist.barrier()
        if dist.get_rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            message = error_of(partial(function, {"x": big, "y": big}, f"{path}/{name}"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        found = torch.zeros(8, 4)
        load({"x": found}, f"{path}/former")
        is_same = torch.equal(found, numbers((8, 4))) and contents(Path(path)) == before
        results.append((message, sorted(os.listdir(path)), is_same))
    return results


@pytest.mark.ranks
def test_a_full_disk_says_so_on_all_ranks_and_leaves_the_former_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(save_on_a_full_disk, str(tmp_path))

    assert found == [found[0]] * 4
    for (_, victim, _), (message, names, is_same) in zip(FULL, found[0], strict=True):
        assert f"rank {victim}: " in message
        assert "File too large" in message
        assert names == ["former"]
        assert is_same


def test_a_disk_that_is_full_for_the_metadata_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"x": numbers((3,))}, tmp_path / "x")
    before = contents(tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(metadata_file, "as_bytes", fail)
        for name in ("x", "new"):
            with pytest.raises(CheckpointError, match=r"rank 0: OSError: .* No space left on device"):
                save({"x": numbers((3,)) + 1}, tmp_path / name)
            assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_a_save_succeeds_where_former_files_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"x": numbers((3,))}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        save({"x": numbers((3,)) + 1}, tmp_path)
    assert loaded(tmp_path) == [2]
    assert len(list(tmp_path.iterdir())) == 3

    save({"x": numbers((3,)) + 2}, tmp_path)
    assert loaded(tmp_path) == [3]
    assert len(list(tmp_path.iterdir())) == 2


def test_files_that_the_first_rank_does_not_see_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"x": numbers((3,))}, tmp_path / "x")
    write_data = storage.Writer.write_data

    def write_elsewhere(self: Any, *arguments: Any) -> Any:
        results = write_data(self, *arguments)
        for file in (tmp_path / "x").glob(f"*{self.save_id}*"):
            file.unlink()
        return results

    monkeypatch.setattr(storage.Writer, "write_data", write_elsewhere)
    with pytest.raises(CheckpointError, match="is not there: give a path on a file system that all ranks share"):
        save({"x": numbers((3,)) + 1}, tmp_path / "x")
    assert loaded(tmp_path / "x") == [1]


# -- a save that is killed


def killed_while_saving(path: Path, moment: str) -> None:
    def kill(*_: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before it is published":
        metadata_file.as_bytes = kill
    save({"x": numbers((3,)) + 1}, path, progress=kill if moment == "while it writes" else None)


@pytest.mark.parametrize("moment", ["while it writes", "before it is published"])
def test_a_killed_save_leaves_the_former_checkpoint_and_its_rest_is_removed(moment: str, tmp_path: Path) -> None:
    save({"x": numbers((3,))}, tmp_path / "former")
    for name in ("former", "new"):
        process = multiprocessing.get_context("fork").Process(
            target=killed_while_saving, args=(tmp_path / name, moment)
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert any(tmp_path.glob(f"{name}/__0_*-*.distcp"))

    assert loaded(tmp_path / "former") == [1]
    assert "it is no checkpoint: it has no file .metadata" in error_of(lambda: loaded(tmp_path / "new"))
    for name, count in (("former", 2), ("new", 0)):
        assert "No space left" in error_of(partial(save, {"x": numbers((3,)) + 2}, tmp_path / name, progress=fail))
        assert len(list((tmp_path / name).iterdir())) == count
    assert loaded(tmp_path / "former") == [1]
    for name in ("former", "new"):
        save({"x": numbers((3,)) + 2}, tmp_path / name)
        assert loaded(tmp_path / name) == [3]
        assert len(list((tmp_path / name).iterdir())) == 2


# -- loading while another process saves


def save_of_ranks(path: str) -> None:
    save({name: distribute_tensor(torch.ones(8), mesh_of(4), [Shard(0)]) for name in "abc"}, path)


def publish(version: Path, path: Path) -> None:
    """Put a checkpoint that was saved elsewhere in place of another, as a save does before it removes files."""
    for file in version.glob("*.distcp"):
        shutil.copy(file, path)
    shutil.copy(version / ".metadata", path / ".unpublished")
    (path / ".unpublished").replace(path / ".metadata")


@pytest.mark.ranks
def test_a_load_that_has_begun_reads_the_version_that_it_began_with(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_of_ranks, str(tmp_path / "x"))
    state = {name: torch.zeros(8) for name in "abc"}
    calls = []

    def save_again(*_: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            save({name: torch.full((8,), 2.0) for name in "abc"}, tmp_path / "x")

    load(state, tmp_path / "x", progress=save_again)

    assert len(calls) == 12
    assert all(torch.equal(x, torch.ones(8)) for x in state.values())
    assert loaded(tmp_path / "x", *"abc", size=8) == [2, 2, 2]


def test_a_load_begins_again_when_its_files_have_been_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"x": numbers((3,))}, tmp_path)
    prepare, saves = storage.Reader.prepare_local_plan, iter([2.0, 3.0])

    def replace_first(self: Any, plan: Any) -> Any:
        for number in saves:
            save({"x": torch.full((3,), number)}, tmp_path)
            break
        return prepare(self, plan)

    monkeypatch.setattr(storage.Reader, "prepare_local_plan", replace_first)

    assert loaded(tmp_path) == [3]
    next(tmp_path.glob("*.distcp")).unlink()
    assert "FileNotFoundError" in error_of(lambda: loaded(tmp_path))


def load_while_it_is_replaced(path: str) -> list[float]:
    """Rank 3 reads the metadata when another version has been published, the others before."""
    state = {name: distribute_tensor(torch.zeros(8), mesh_of(4), [Shard(0)]) for name in "abc"}
    read, is_first = metadata_file.read, True

    def read_late(directory: Path) -> Any:
        nonlocal is_first
        metadata = read(directory)
        if is_first:
            is_first = False
            dist.barrier()
            if dist.get_rank() == 3:
                publish(Path(path, "second"), Path(path, "x"))
                metadata = read(directory)
        return metadata

    metadata_file.read = read_late
    try:
        load(state, Path(path, "x"))
    finally:
        metadata_file.read = read
    return [whole(x)[i].item() for x in state.values() for i in range(8)]


@pytest.mark.ranks
def test_all_ranks_load_one_version(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_of_ranks, str(tmp_path / "x"))
    save({name: torch.full((8,), 2.0) for name in "abc"}, tmp_path / "second")

    assert ranks.run(load_while_it_is_replaced, str(tmp_path)) == [[2.0] * 24] * 4


def load_often(path: str, count: int) -> list[float]:
    state = {name: distribute_tensor(torch.zeros(8), mesh_of(4), [Shard(0)]) for name in "abc"}
    seen = set()
    for _ in range(count):
        load(state, path)
        values = {whole(x)[i].item() for x in state.values() for i in range(8)}
        assert len(values) == 1, values
        seen |= values
    return sorted(seen)


def save_often(path: Path, stop: Any) -> None:
    number = 1.0
    while not stop.is_set():
        number += 1
        save({name: torch.full((8,), number) for name in "abc"}, path)


@pytest.mark.ranks
@pytest.mark.thorough
def test_loads_succeed_while_another_process_saves_all_the_time(ranks: RankPool, tmp_path: Path) -> None:
    save({name: torch.ones(8) for name in "abc"}, tmp_path / "x")
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    saver = context.Process(target=save_often, args=(tmp_path / "x", stop))
    saver.start()
    try:
        found = ranks.run(load_often, str(tmp_path / "x"), 3)
    finally:
        stop.set()
        saver.join(60)

    assert saver.exitcode == 0
    assert found == [found[0]] * 4
    assert len(found[0]) > 1
