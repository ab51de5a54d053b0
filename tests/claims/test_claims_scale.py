"""Claims on whole machines, from published tables: which rows stand, what fits, who is ahead where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.default_cases import one_way_each

from dshard import Mesh
from dshard.errors import StrategyError
from dshard.topology import BYTES

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers import memory
from benchmarks.papers.curves import bound, exponent, least, point
from benchmarks.papers.layers import layers
from benchmarks.papers.scaling import (
    TABLES,
    fit,
    host_tiles,
    misfit,
    most_with_ties,
    over_gather,
    read,
    spearman,
    step_seconds,
    unflagged,
)
from benchmarks.papers.traced import Sizes, events_of, gathered_again, passes_of


def test_e7_tables_load_and_their_contradictions_are_flagged() -> None:
    """Claim E7: the strongest ratios of Tesseract's abstract compare with flagged rows: nothing is fitted to these."""
    flagged = {table: {(row.system, row.shape) for row in read(table) if row.flag} for table in TABLES}

    assert [len(read(table)) for table in TABLES] == [8, 8, 12, 13]
    assert not flagged["optimus_2"]
    assert flagged["optimus_3"] == {("megatron", (64,)), ("optimus", (4, 4))}
    for table in ("tesseract_1", "tesseract_2"):
        copied = {row.forward for row in read(table) if row.system == "megatron"}
        assert {("megatron", (gpus,)) for gpus in (4, 16, 64)} <= flagged[table]
        assert copied <= {row.forward for name in ("optimus_2", "optimus_3") for row in read(name)}
    twice = [row for name in ("tesseract_1", "tesseract_2") for row in read(name) if row.shape == (8, 8, 1)]
    assert len({(row.forward, row.backward) for row in twice}) == 1
    assert len({row.hidden for row in twice}) == 2


def test_e7_equal_layouts_with_different_times_bound_every_model() -> None:
    found = [most_with_ties(unflagged(table)) for table in TABLES]

    assert found[:2] == [1.0, 1.0]
    assert found[2] < 0.9
    assert found[3] < 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("table", ["optimus_2", "optimus_3"])
def test_s15_the_sides_of_the_crossovers(table: str) -> None:
    """Claim S15, tables 2 and 3 of Optimus: Megatron is ahead on 4 GPUs, Optimus on 64.

    On 16 in weak scaling the published times are 2 % apart, less than the error of the prediction, which has them the
    other way round.
    """
    rows = unflagged(table)
    machine = fit(rows, "pipelined")
    found = {(row.system, row.gpus): step_seconds(row, machine, "pipelined") for row in read(table)}
    published = {(row.system, row.gpus): row.seconds for row in read(table)}

    assert found["megatron", 4] < found["optimus", 4]
    assert found["optimus", 64] < found["megatron", 64]
    if table == "optimus_2":
        error = misfit(machine, rows, "pipelined") ** 0.5
        assert found["optimus", 36] < found["megatron", 36]
        assert found["optimus", 16] > found["megatron", 16]
        assert published["megatron", 16] / published["optimus", 16] - 1 < error / 3
    else:
        assert spearman([found[row.system, row.gpus] for row in rows], [row.seconds for row in rows]) > 0.9


def test_s9_trees_cost_more_than_gathers_by_the_paper_s_factor() -> None:
    """Claim S9: (log2 q) / q for trees, (q - 1) / q^2 for gathers."""
    for q in (2, 4, 8, 16):
        assert (q - 1) / q**2 * over_gather("trees", q) == pytest.approx((q.bit_length() - 1) / q)


def test_s16_optimus_takes_480_sequences_and_megatron_many_times_fewer() -> None:
    """Claim S16: its own 480 is met; the ratio of 8 is not, as Megatron's 60 needs block inputs of 24 GB in 16 GB."""
    most = memory.optimus_batches()

    assert most["optimus"] == pytest.approx(480, rel=0.05)
    assert most["optimus"] / most["megatron"] > 8 * 1.25
    assert memory.RTX_5000 < 24 * 60 * 512 * 8192 * 4


def test_d4_sixteen_heads_keep_megatron_to_sixteen_ranks_and_blocks_to_more() -> None:
    """Claim D4: ViT-Large/16 has 16 heads; in blocks of 8 x 8 they divide among 8 columns."""
    vit = Sizes(1024, 16, 197, 64)

    passes_of(vit, 64, Mesh((16,), ("tp",)), "megatron", BYTES, torch.float32)
    with pytest.raises(StrategyError, match="16 heads in dim 0, split over 64 ranks"):
        passes_of(vit, 64, Mesh((64,), ("tp",)), "megatron", BYTES, torch.float32)
    passes_of(vit, 64, Mesh((8, 8), ("r", "c")), "optimus", BYTES, torch.float32)


def test_d5_blocks_hold_larger_batches_and_models_by_the_published_order() -> None:
    """Claim D5: 5.3 times the batch, 9.55 times the parameters on 64 GPUs of 40 GB; fp32, Adam, nothing run again."""
    batches, parameters = memory.blog_batches(), memory.blog_parameters()

    assert batches["optimus"] / batches["megatron"] == pytest.approx(5.3, rel=0.5)
    assert parameters["optimus"] / parameters["megatron"] == pytest.approx(9.55, rel=0.1)


def test_layers_of_atp_s_table_2_have_its_parameters_and_operations() -> None:
    found = layers()

    assert [row.model for row in found] == ["M1", "M2", "M3", "M4"]
    assert all(abs(error) < 1e-9 for row in found for error in row.errors)


@pytest.mark.parametrize(("form", "power"), [("megatron", 3.0), ("optimus", 1.5)])
def test_s10_exponents_fitted_over_all_numbers_of_ranks(form: str, power: float) -> None:
    """Claim S10, with gathers or pipelined broadcasts: the logarithm of Optimus is that of its trees."""
    assert exponent(form, [64, 256, 1024, 4096]) == pytest.approx(power, abs=0.15)


SIZES, SEQUENCES = Sizes(8192, 128, 32, 64), 64
BSH, HH = SEQUENCES * SIZES.tokens * SIZES.hidden, SIZES.hidden**2


def received(strategy: str, *shape: int) -> tuple[float, float]:
    """Elements that a rank receives in a block, forward and backward; norms have a thousandth of them."""
    mesh = Mesh(shape, {1: ("tp",), 2: ("r", "c"), 3: ("d", "r", "c")}[len(shape)])
    passes = passes_of(SIZES, SEQUENCES, mesh, strategy, BYTES, torch.float32)
    forward, both = (events_of(step, BYTES) for step in passes)
    backward = (*both[len(forward) :], *gathered_again(forward))
    return sum(e.nbytes for e in forward) / 4, sum(e.nbytes for e in backward) / 4


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_m4_megatron_moves_what_its_paper_says(p: int) -> None:
    """Claim M4: two all_reduces of b s h each way; sequence parallelism gathers its inputs once more."""
    once = (p - 1) / p * BSH

    assert received("megatron", p) == pytest.approx((4 * once, 4 * once), rel=1e-3)
    assert received("megatron-sp", p) == pytest.approx((4 * once, 6 * once), rel=1e-3)


@pytest.mark.parametrize("q", [2, 4, 8])
def test_s9_optimus_moves_the_volumes_of_its_table_1(q: int) -> None:
    """Claim S9: (q - 1) / q^2 (7 b s h + 12 h^2) forward, twice that backward without recomputation."""
    volume = (q - 1) / q**2 * (7 * BSH + 12 * HH)

    assert received("optimus", q, q) == pytest.approx((volume, 2 * volume), rel=1e-3)


@pytest.mark.parametrize(("q", "depth"), one_way_each([2, 4], [2, 4]))
def test_tesseract_gathers_less_the_deeper_it_is(q: int, depth: int) -> None:
    """Activations are split over the depth, weights are not; their gradients are summed over it once."""
    activations, weights = (q - 1) / q**2 * 7 * BSH / depth, (q - 1) / q**2 * 12 * HH
    summed = 2 * (depth - 1) / depth * 12 * HH / q**2
    expected = activations + weights, 2 * (activations + weights) + summed

    assert received("tesseract", depth, q, q) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("rows", "columns", "host"), [(4, 4, 4), (8, 8, 4), (4, 6, 2), (6, 6, 4), (8, 8, 8)])
def test_s14_bunched_hosts_are_blocks(rows: int, columns: int, host: int) -> None:
    """Claim S14: with 4 GPUs a node and q = 4, each column and row of the mesh crosses two nodes, not four."""
    ranks = host_tiles(rows, columns, host)
    grid, plain = (
        [order[i * columns : (i + 1) * columns] for i in range(rows)] for order in (ranks, range(rows * columns))
    )
    crossed, before = (
        [len({rank // host for rank in line}) for line in (*lines, *zip(*lines, strict=True))]
        for lines in (grid, plain)
    )

    assert sorted(ranks) == [*range(rows * columns)]
    assert max(crossed) <= max(before)
    if (rows, columns, host) == (4, 4, 4):
        assert (set(crossed), max(before)) == ({2}, 4)


RANKS = [
    *((p, 3) for p in (4, 16)),
    *(pytest.param(p, n, marks=pytest.mark.thorough) for p, n in [(64, 3), *((4**i, 4) for i in range(1, 8))]),
]


@pytest.mark.parametrize(("ranks", "axes"), RANKS)
def test_the_plan_of_all_layouts_is_near_the_bound(ranks: int, axes: int) -> None:
    """Each tensor stored once: at most 1.05 times what any program receives from 64 ranks on, 1.15 times below."""
    times = least(ranks, axes=axes).nbytes / bound(ranks).nbytes

    assert 1 <= times <= (1.15 if ranks < 64 else 1.05)


@pytest.mark.parametrize("ranks", [4, 16])
def test_more_copies_receive_less(ranks: int) -> None:
    found = [least(ranks, copies, axes=2).nbytes for copies in (1, 2, 4)]

    assert found[0] > found[1] > found[2]


def test_a_plan_receives_what_dshard_s_own_moves_do() -> None:
    """Fully sharded data parallelism is the plan of four ranks, and its program is traced."""
    assert least(4).nbytes == pytest.approx(point("fsdp", 4, BYTES).nbytes, rel=1e-3)
