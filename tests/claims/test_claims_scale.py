"""Claims on whole machines, from published tables: which rows stand, what fits, who is ahead where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dshard.errors import ShapeError
from dshard.simulate import Model, Setup, form_of, simulate_step
from dshard.simulate.block import BlockCosts
from dshard.simulate.training_step import parts_of
from dshard.topology import Topology

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers import memory
from benchmarks.papers.curves import exponent
from benchmarks.papers.layers import layers
from benchmarks.papers.scaling import (
    LAYERS,
    TABLES,
    TOKENS,
    ByStep,
    Machine,
    Row,
    fit,
    misfit,
    most_with_ties,
    over_gather,
    read,
    spearman,
    step_seconds,
    unflagged,
)


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
    vit, topology = Model(24, 1024, 16, 197), Topology.preset("dgx-a100", nodes=8)

    simulate_step(vit, Setup(form_of("megatron"), (16,)), topology, 64, exact=False)
    with pytest.raises(ShapeError, match="16 heads do not divide among 64 ranks"):
        simulate_step(vit, Setup(form_of("megatron"), (64,)), topology, 64, exact=False)
    simulate_step(vit, Setup(form_of("optimus"), (8, 8)), topology, 64, exact=False)


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


def test_panels_of_a_deep_mesh_travel_as_those_of_a_plane_do() -> None:
    """A gradient summed over depth and rows has two steps: only the one over the rows is one of panels."""
    row = Row("tesseract", (2, 2, 2), 16, 256, 4, 1.0, 1.0, "")
    model = Model(LAYERS, row.hidden, row.heads, TOKENS, fused=False)
    topology = Machine(5e12, 8e9, 8e9).topology(row.gpus)
    whole, split = (
        parts_of(kind(model, row.setup(), topology, "float32", 4, exact=False, regather=True), row.batch).backward
        for kind in (BlockCosts, ByStep)
    )
    panels = [sum(e.seconds for e in events if e.axes and set(e.axes) <= {"r", "c"}) for events in (whole, split)]

    assert sum(e.seconds for e in split) == pytest.approx(sum(e.seconds for e in whole))
    assert any(set(e.axes) > {"d"} for e in whole)
    assert not any(set(e.axes) > {"d"} for e in split)
    assert panels[0] < panels[1]
