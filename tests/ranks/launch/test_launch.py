"""Ranks of our own are heard, and fail loudly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from dshard.errors import MeshError, RankError
from dshard.launch import choose_device, choose_ranks
from dshard.launch.group import _cause, run_ranks
from dshard.launch.processes import Failure, FailureKind

WAIT = 120.0  # seconds for ranks to start on a busy machine


def talk(rank: int, meet: str, send: Callable[[object], None]) -> None:
    """Say one's number, two times."""
    send(rank)
    send(10 * rank)


def fail(how: str, rank: int, meet: str, send: Callable[[object], None]) -> None:
    """Rank 1 fails while the others wait for it."""
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    if rank == 1 and how == "raise":
        raise ValueError("no such thing")
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "hang":
        signal.pause()
    dist.barrier()


def test_a_silent_death_is_the_cause_of_later_errors() -> None:
    failures = {
        0: Failure(FailureKind.RAISED, "raised RuntimeError: Connection closed by peer", "", 5.0),
        2: Failure(FailureKind.EXITED, "exited with code -9", "", 6.0),
    }

    assert _cause(failures, 1.0) == "rank 2 failed: its process ended with exit code -9"


def test_the_first_error_is_the_cause_of_later_errors() -> None:
    failures = {
        0: Failure(FailureKind.RAISED, "raised RuntimeError: Connection closed by peer", "", 5.0),
        1: Failure(FailureKind.WAITING, "had not answered after 1.0 s", "", 6.0),
        2: Failure(FailureKind.RAISED, "raised ValueError", "", 4.0),
    }

    assert _cause(failures, 1.0) == "rank 2 failed: ValueError\n"


@pytest.mark.ranks
def test_each_rank_is_heard() -> None:
    heard: list[int] = []

    run_ranks(talk, 2, heard.append, WAIT)

    assert sorted(heard) == [0, 0, 1, 10]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 failed: ValueError: no such thing\n.*in fail"),
        ("die", "rank 1 failed: its process ended with exit code -9"),
    ],
)
def test_a_failure_names_its_rank(how: str, message: str) -> None:
    with pytest.raises(RankError, match=f"(?s){message}"):
        run_ranks(partial(fail, how), 2, print, WAIT)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_hang_is_an_error() -> None:
    with pytest.raises(RankError, match="ranks 0, 1 said nothing for 5 s and were stopped"):
        run_ranks(partial(fail, "hang"), 2, print, patience=5.0)


class TestChoices:
    @pytest.fixture(autouse=True)
    def own_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    @pytest.mark.parametrize(
        ("asked", "device", "ranks"), [(None, "auto", 4), (None, "cpu", 4), (3, "cpu", 3), (None, "cuda", 1)]
    )
    def test_ranks_are_four_or_one_for_each_gpu(self, asked: int | None, device: str, ranks: int) -> None:
        assert choose_ranks(asked, device) == ranks

    def test_a_launcher_decides_the_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "8")

        assert choose_ranks(None, "cpu") == choose_ranks(8, "cpu") == 8
        with pytest.raises(MeshError, match="asked for 4 ranks, but the launcher started 8: leave --ranks out"):
            choose_ranks(4, "cpu")

    @pytest.mark.parametrize(("asked", "ranks", "device"), [("auto", 1, "cuda"), ("auto", 4, "cpu"), ("cpu", 1, "cpu")])
    def test_cuda_is_taken_where_each_rank_has_a_gpu(self, asked: str, ranks: int, device: str) -> None:
        assert choose_device(asked, ranks) == device

    def test_too_few_gpus_are_an_error(self) -> None:
        with pytest.raises(MeshError, match="4 ranks on CUDA need a GPU each and this host has 1"):
            choose_device("cuda", 4)

    def test_ranks_started_here_may_share_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert choose_device("cuda", 4, share_gpus=True) == "cuda"
        assert choose_device("auto", 4, share_gpus=True) == "cpu"

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(MeshError, match="4 ranks on CUDA need a GPU each and this host has 0"):
            choose_device("cuda", 4, share_gpus=True)
