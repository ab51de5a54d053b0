"""A rank that waits long for others says so, once: in which line, for which ranks; all others go on as they were."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from math import inf
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.default_cases import one_in
from torch import Tensor

import dshard
from dshard import Replicate, Shard, distribute_tensor
from dshard.comm import peer_failure, told_waits
from dshard.comm.user_code import user_call
from dshard.debug import tell_waits
from dshard.errors import ArgumentError
from dshard.testing import RankPool

pytestmark = pytest.mark.ranks
SOON = 0.2  # seconds until a wait is told


def mesh() -> Any:
    return dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def weight() -> Any:
    return distribute_tensor(torch.arange(8.0), mesh(), [Shard(0)], src_data_rank=None)


def norm(x: Any) -> float:
    return x.norm().item()  # type: ignore[no-any-return]


def gathered(x: Any) -> Tensor:
    return x.full_tensor()  # type: ignore[no-any-return]


MADE_ALONE: dict[str, Callable[[Any], Any]] = {"norm": norm, "full_tensor": gathered}


def late(name: str, seconds: float, times: int = 2) -> tuple[list[str], list[float]]:
    """The lines that this rank has written while rank 0 comes to some calls before the others, and what all compute."""
    x, written = weight(), io.StringIO()
    tell_waits(inf if dist.get_rank() else seconds)  # on a busy machine the others wait for long, too
    try:
        with patch.object(peer_failure, "PATIENCE", timedelta(seconds=SOON / 2)), contextlib.redirect_stderr(written):
            for _ in range(times):
                if dist.get_rank():
                    time.sleep(4 * SOON)
                value = torch.as_tensor(MADE_ALONE[name](x))
            after = (x * 2).redistribute(placements=[Replicate()]).to_local()
    finally:
        tell_waits(10)
        told_waits._TOLD.clear()
    told = [line for line in written.getvalue().splitlines() if "redistribute at" not in line]
    return told, [*value.reshape(-1).tolist(), *after.tolist()]


@pytest.mark.parametrize("name", one_in(2, MADE_ALONE))
def test_the_rank_that_waits_tells_once_in_which_line_and_for_whom(name: str, ranks: RankPool) -> None:
    (told, values), *others = ranks.run(late, name, SOON)

    assert len(told) == 1, told
    assert "rank 0 has waited" in told[0]
    assert f"{name} at {__file__}:" in told[0]
    assert "for rank 1, 2, 3" in told[0]
    assert [lines for lines, _ in others] == [[]] * 3
    assert all(each == values for _, each in others), "no other collective is mispaired"


def test_nothing_is_told_of_where_none_is_asked_for(ranks: RankPool) -> None:
    assert [told for told, _ in ranks.run(late, "norm", inf, 1)] == [[]] * 4


def test_a_time_is_checked() -> None:
    with pytest.raises(ArgumentError, match="seconds"):
        tell_waits(-1.0)


@pytest.mark.parametrize("text", ["abc", "", "-1", "nan"])
def test_a_time_of_the_environment_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSHARD_WAIT_SECONDS", text)
    with pytest.raises(ArgumentError, match="DSHARD_WAIT_SECONDS"):
        told_waits._of_environment()


def chain() -> list[str]:
    """Rank 1 waits for rank 2 in one call; then rank 0 waits for rank 1 in another."""
    x, rank, written = weight(), dist.get_rank(), io.StringIO()
    with patch.object(peer_failure, "PATIENCE", timedelta(seconds=SOON / 2)), contextlib.redirect_stderr(written):
        time.sleep(6 * SOON * (rank == 2))
        gathered(x)
        tell_waits(inf if rank else SOON)
        time.sleep(6 * SOON * (rank == 1))
        norm(x)
        tell_waits(10)
    told_waits._TOLD.clear()
    return written.getvalue().splitlines()


@pytest.mark.thorough
def test_ranks_that_waited_before_were_last_seen_there(ranks: RankPool) -> None:
    (told,), *_ = ranks.run(chain)

    assert "rank 0 has waited" in told
    assert "for rank 1" in told
    assert "rank 1 last waited in full_tensor at" in told


def interrupted() -> str:
    """Rank 0 ends its wait as Ctrl-C does, and goes on; the others come to the call later."""
    x = weight()

    def end(*args: object) -> None:
        raise KeyboardInterrupt

    try:
        if dist.get_rank() == 0:
            with (
                patch.object(peer_failure, "PATIENCE", timedelta(seconds=SOON)),
                patch.object(peer_failure, "tell_if_long", end),
                contextlib.suppress(KeyboardInterrupt),
            ):
                norm(x)
        else:
            time.sleep(4 * SOON)
        return f"no error, {gathered(x * (1 + dist.get_rank())).tolist()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_wait_that_the_program_ends_is_one_error_on_all_ranks() -> None:
    with RankPool(4) as pool:
        found = pool.run(interrupted)

    assert all(text.startswith("PeerError") and "the program has ended the wait" in text for text in found), found


# -- where the host waits in a later call


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["norm", "full_tensor"])
def test_over_nccl_a_thread_tells_where_the_host_waits(name: str) -> None:
    with RankPool(4, "nccl_contract") as pool:
        (told, values), *others = pool.run(late, name, SOON)

    assert len(told) == 1, told
    assert "rank 0 has waited" in told[0]
    assert f"{__file__}:" in told[0]
    assert "for rank 1, 2, 3" in told[0]
    assert [lines for lines, _ in others] == [[]] * 3
    assert all(each == values for _, each in others)


def test_a_wait_is_told_at_the_line_of_its_own_thread() -> None:
    begun, end = Event(), Event()

    def wait() -> None:
        begun.set()
        end.wait(60)

    thread = Thread(target=wait)
    thread.start()
    begun.wait(60)
    try:
        call = user_call(sys._current_frames()[thread.ident or 0])
    finally:
        end.set()
        thread.join()
    line = wait.__code__.co_firstlineno
    assert call.rpartition(" ")[2] in {f"{__file__}:{line + 1}", f"{__file__}:{line + 2}"}


CALLS = {
    "forward pass": "def enter(): return call()",
    "batches": "def _until_all_end(): yield call()\nenter = lambda: next(x for x in _until_all_end())",
}


@pytest.mark.parametrize("title", CALLS)
def test_calls_have_the_names_that_a_program_knows(title: str) -> None:
    scope: dict[str, Any] = {"call": user_call}
    exec(compile(CALLS[title], dshard.__file__, "exec"), scope)

    assert scope["enter"]().startswith(f"{title} at {__file__}:")
