"""The self-test, and with it the library under NCCL's contract.

All tests of ranks run under the contract with DSHARD_TEST_BACKEND=nccl_contract; this is a cut of them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from dshard import Mesh, Shard, Topology, distribute_tensor
from dshard.cost import LARGE_PIECE, collective_seconds
from dshard.testing import HostSyncError, RankPool, cuda_contract, nccl_contract, rank_pool
from dshard.tools.cli import main
from dshard.tools.nccl_contract.process_state import CURRENT
from dshard.tools.report import selftest_failures, selftest_table
from dshard.tools.report.console import show
from dshard.tools.selftest import Result, SelfTest, selftest_checks, selftest_run
from dshard.tools.selftest.selftest_checks import (
    CHECKS,
    LOOPS,
    PLANS,
    Differs,
    Place,
    attention,
    captured,
    captured_steps,
    products,
    training_steps,
)

PLACE = Place("cpu", 4)


def cut(every: int) -> int:
    """Some of the checks; returns the waits that they needed."""
    for name in ("reductions", "other meshes", "random numbers")[::every]:
        CHECKS[name](PLACE)
    products(PLACE, *("column-sequence", "row", "tesseract", "summa", "cannon")[::every])
    training_steps(PLACE, "fsdp")
    if every == 1:
        captured_steps(PLACE, "megatron")
    return nccl_contract.usage().stream_waits


@pytest.mark.ranks
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_the_library_keeps_the_contract_of_nccl(every: int) -> None:
    assert all(waits > 50 for waits in rank_pool(4, nccl_contract.BACKEND).run(cut, every))


def gathered(shape: tuple[int, int], hosts: int) -> tuple[bool, list[str]]:
    """Whether rows are gathered right on so many hosts, and the kernels that it took."""
    whole, begun = torch.arange(shape[0] * shape[1]).to(torch.int8).view(shape), list[str]()
    mesh = PLACE.mesh(f"on_{hosts}")
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    CURRENT.state.listeners.append(lambda operation: begun.append(operation.what.partition(" at ")[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(4 // hosts))  # which the mesh reads when its group is first used
        right = x.full_tensor().equal(whole)
    CURRENT.state.listeners.pop()
    return right, begun


def by_symmetric_memory() -> str:
    return CHECKS["symmetric memory"](PLACE)


def attended_and_replayed() -> tuple[str, str]:
    """What two of the checks say."""
    return CHECKS["attention"](Place("cpu", 2)), CHECKS["replayed steps"](Place("cpu", 2))


@pytest.mark.ranks
@pytest.mark.thorough
def test_attention_and_replayed_steps_are_checked() -> None:
    with RankPool(2, "gloo") as pool:
        for said, replayed in pool.run(attended_and_replayed):
            assert said == f"{', '.join(LOOPS)}; 3 dtypes, causal and not, with gradients"
            assert re.fullmatch(r"fsdp: [3-6] of 6 replayed; megatron: [3-6] of 6 replayed", replayed)


def attended(wrong: int | None = None) -> str:
    """The check of attention as on a GPU; one result of the second loop is made `wrong`."""
    original, calls = selftest_checks._attended, list[bool]()

    def counted(given: list[Tensor], causal: bool) -> list[Tensor]:
        results = original(given, causal)
        calls.append(causal)
        if len(calls) == 4 and wrong is not None:
            results[wrong] *= 1.1
        return results

    with pytest.MonkeyPatch.context() as patch, cuda_contract():
        patch.setattr(selftest_checks, "_attended", counted)
        try:
            return attention(PLACE, torch.bfloat16)
        except Differs as error:
            return str(error)


@pytest.mark.ranks
def test_attention_is_checked_as_on_a_gpu_and_faults_are_found() -> None:
    ranks = rank_pool(4)
    assert set(ranks.run(attended)) == {f"{', '.join(LOOPS)}; 1 dtypes, causal and not, with gradients"}
    for text in ranks.run(attended, 2):
        assert text.startswith("balanced ring, torch.bfloat16, causal=False: the gradient of key is off by 0.1")
    assert CHECKS["attention"](Place("cpu", 1)) == "one rank has no loops"


@pytest.mark.ranks
def test_products_by_symmetric_memory_are_checked_where_there_is_some() -> None:
    assert set(rank_pool(4, nccl_contract.BACKEND).run(by_symmetric_memory)) == {
        "column-sequence, row-sequence, with gradients"
    }
    for detail in rank_pool(4, "gloo").run(by_symmetric_memory):
        assert detail.startswith("none without GPUs over NCCL")
    assert CHECKS["symmetric memory"](Place("cpu", 1)) == "one rank sends nothing"


def test_ranks_that_share_a_gpu_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    assert Place("cuda", 1).has_own_gpus()
    assert not Place("cuda", 2).has_own_gpus()
    assert CHECKS["network"](Place("cuda", 2)) == "not measured, as ranks share a GPU"
    assert CHECKS["symmetric memory"](Place("cuda", 2)) == "none between ranks that share a GPU"

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of two hosts
    assert Place("cuda", 2).has_own_gpus()


def test_a_check_makes_each_mesh_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, ...]]()
    monkeypatch.setattr(selftest_checks, "init_device_mesh", lambda _, shape, **__: made.append(shape))
    place = Place("cpu", 4)

    for _ in range(2):
        place.mesh("x")
        place.mesh("x", "y")

    assert made == [(4,), (2, 2)]


LARGE = (5, LARGE_PIECE // 2 + 1)  # two of the rows are a large piece
KERNELS = [((size, 3), hosts, "all_to_all") for size in (7, 5) for hosts in (1, 2)]
KERNELS += [
    ((1, 3), 2, "all_to_all_single"),
    ((8, 3), 2, "all_gather_into_tensor"),
    (LARGE, 1, "all_to_all"),
    (LARGE, 2, "group of collectives"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "hosts", "kernel"), KERNELS)
def test_pieces_of_any_sizes_are_gathered_by_one_kernel(shape: tuple[int, int], hosts: int, kernel: str) -> None:
    for answer in rank_pool(4, nccl_contract.BACKEND).run(gathered, shape, hosts):
        assert answer == (True, [kernel])


@pytest.mark.parametrize("generation", ["dgx-a100", "dgx-h100"])
def test_pieces_of_different_sizes_are_gathered_as_the_prices_of_presets_say(generation: str) -> None:
    """By messages, or by a broadcast of each; all but twice as large or as small as where the choice changes."""
    for nodes, ranks in ((1, 8), (2, 16), (4, 32)):
        mesh, topology = Mesh((ranks,), ("x",)), Topology.preset(generation, nodes=nodes)
        for nbytes in (2**10, 2**17, LARGE_PIECE // 4, 2 * LARGE_PIECE, 2**26):
            messages = collective_seconds("all_to_all", (ranks - 1) * nbytes, mesh, "x", topology)
            broadcasts = ranks * collective_seconds("broadcast", nbytes, mesh, "x", topology)
            assert (messages < broadcasts) == (nodes == 1 or nbytes <= LARGE_PIECE), (nodes, nbytes)


@pytest.mark.ranks
@pytest.mark.thorough
def test_figures_to_see_are_those_of_the_ranks() -> None:
    (network,) = set(rank_pool(4).run(CHECKS["network"], PLACE))

    assert re.fullmatch(r"all_gather at \S+ GB/s, \S+ us; assumed until measured: 2 GB/s, 100 us", network)
    assert CHECKS["memory"](PLACE) == "counted on CUDA alone"
    assert CHECKS["network"](Place("cpu", 1)) == "one rank has none"


class Recorded:
    """What is asked of CUDA, in order: stands for its streams, and for its graph."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def wait_stream(self, stream: Recorded) -> None:
        self.asked.append("follow")

    def replay(self) -> None:
        self.asked.append("replay")

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        self.asked.append(name)
        yield
        self.asked.append(f"end of {name}")


def test_on_cuda_a_step_is_captured_after_some_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, graph_of = Recorded(), inspect.signature(torch.cuda.graph)
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: cuda)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream.noted("stream"))
    monkeypatch.setattr(
        torch.cuda, "graph", lambda *args, **options: graph_of.bind(*args, **options).args[0].noted("graph")
    )

    replay = captured("cuda", lambda: cuda.asked.append("step"), 2)
    replay()

    warm = ["follow", "stream", "step", "step", "end of stream", "follow"]
    assert cuda.asked == [*warm, "graph", "step", "end of graph", "replay"]


def test_a_step_that_waits_is_not_said_to_be_one_that_can_be_captured() -> None:
    with pytest.raises(HostSyncError, match="reads a number"):
        captured("cpu", lambda: print(torch.ones(1).item(), end=""), 1)


def wrong(place: Place) -> str:
    selftest_checks._same(torch.ones(2), torch.zeros(2), "a product")
    return "never said"


def test_what_differs_is_an_error_that_says_what() -> None:
    with pytest.raises(AssertionError, match="a product: Tensor-likes are not equal"):
        wrong(PLACE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_meshes_have_all_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(selftest_checks, "init_device_mesh", lambda _, shape, **__: shapes.append(shape))
    for axes in PLANS.values():
        Place("cpu", ranks).mesh(*axes)
        assert len(shapes[-1]) == len(axes)
        assert torch.Size(shapes[-1]).numel() == ranks


def test_a_failure_is_reported_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    results = Result("gloo", "products", True, 1.0, "summa"), Result("gloo", "checkpoints", False, 2.0, "why\nwhere")
    tested = SelfTest(results, selftest_run.environment("cpu"))

    show(selftest_table(tested))
    text = selftest_failures(tested)

    assert "FAILED" in capsys.readouterr().out
    assert text.splitlines()[0] == "1 check failed; please open an issue with what follows"
    assert f"torch: {torch.__version__}" in text
    assert text.endswith("--- gloo, checkpoints\nwhy\nwhere")


@pytest.mark.ranks
@pytest.mark.thorough
def test_the_command_passes_over_gloo_and_under_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {row["backend"] for row in value["results"]} == {"gloo", nccl_contract.BACKEND}
    assert all(row["passed"] for row in value["results"])
    assert value["machine"]["ranks"] == "4"
