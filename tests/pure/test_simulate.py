"""Simulated steps in closed form: the published volumes, overlap, errors."""

from __future__ import annotations

from dataclasses import replace
from math import isclose, log2

import pytest

from dshard.errors import MeshError, ShapeError
from dshard.simulate import FORMS, Model, Setup, form_of, host_tiles, simulate_step, timeline
from dshard.simulate.block import BlockCosts, block_events
from dshard.simulate.memory import memory_of
from dshard.simulate.training_step import parts_of
from dshard.step_timeline import Event, makespan, place_events
from dshard.topology import BYTES, Topology

MODEL = Model(layers=4, hidden=64, heads=16, sequence=32, vocabulary=0)
DGX = Topology.preset("dgx-h100", nodes=4)
SEQUENCES = 64


def received(setup: Setup, *, skip: str = "norm") -> tuple[float, float]:
    """Elements that a rank receives in a block, forward and backward, norms apart; inputs are gathered twice."""
    costs = BlockCosts(MODEL, setup, BYTES, "float32", 1, regather=True)
    forward, backward = block_events(costs, SEQUENCES)
    return tuple(float(sum(e.nbytes for e in events if e.name != skip)) for events in (forward, backward))  # type: ignore[return-value]


BSH = SEQUENCES * MODEL.sequence * MODEL.hidden
HH = MODEL.hidden**2


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_megatron_moves_what_its_paper_says(p: int) -> None:
    """Claim M4: two all_reduces of b s h each way; sequence parallelism gathers its inputs once more."""
    once = (p - 1) / p * BSH
    assert received(Setup(form_of("megatron"), (p,))) == pytest.approx((4 * once, 4 * once))
    assert received(Setup(form_of("megatron-sp"), (p,))) == pytest.approx((4 * once, 6 * once))


@pytest.mark.parametrize("q", [2, 4, 8])
def test_optimus_moves_the_volumes_of_its_table_1(q: int) -> None:
    """Claim S9: (q - 1) / q^2 (7 b s h + 12 h^2) forward, twice that backward without recomputation."""
    volume = (q - 1) / q**2 * (7 * BSH + 12 * HH)
    assert received(Setup(form_of("optimus"), (q, q))) == pytest.approx((volume, 2 * volume))


@pytest.mark.parametrize(("q", "depth"), [(2, 2), (2, 4), (4, 2), (4, 4)])
def test_tesseract_gathers_less_the_deeper_it_is(q: int, depth: int) -> None:
    """Activations are split over the depth, weights are not; their gradients are summed over it once."""
    forward, backward = received(Setup(form_of("tesseract"), (depth, q, q)))
    activations, weights = (q - 1) / q**2 * 7 * BSH / depth, (q - 1) / q**2 * 12 * HH
    summed = 2 * (depth - 1) / depth * 12 * HH / q**2
    assert forward == pytest.approx(activations + weights)
    assert backward == pytest.approx(2 * (activations + weights) + summed)


def test_a_stage_never_sends_the_weights_of_another() -> None:
    setup = Setup(form_of("megatron"), (2,), data=4, stages=2, microbatches=2, sharded="optimizer")
    parts = parts_of(BlockCosts(MODEL, setup, DGX), SEQUENCES)
    assert {axis for event in (*parts.forward, *parts.backward, *parts.sums) for axis in event.axes} == {"dp", "tp"}


@pytest.mark.parametrize("sharded", ["none", "optimizer", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_plans_without_a_search_are_never_cheaper(form: str, sharded: str) -> None:
    for shape in form_of(form).shapes(4) or form_of(form).shapes(8) or form_of(form).shapes(1):
        setup = Setup(form_of(form), shape, data=4, sharded=sharded)  # type: ignore[arg-type]
        exact, straight = (simulate_step(MODEL, setup, DGX, SEQUENCES, exact=exact).seconds for exact in (True, False))
        assert exact <= straight * (1 + 1e-12)


@pytest.mark.parametrize("form", ["ulysses", "context", "ulysses x megatron-sp", "context x megatron-sp"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_attention_whose_sequences_are_split_sends_the_closed_form(form: str, heads: int, kv_heads: int) -> None:
    """By loop h each of query, key, value and result (P - 1) / P of its chunk, by loop q what a rank lacks of two."""
    cp, tp, sequences = 2, 2 if "megatron" in form else 1, 2
    model = Model(layers=1, hidden=64, heads=heads, kv_heads=kv_heads, sequence=8)
    costs = BlockCosts(model, Setup(form_of(form), (cp, tp)[: 1 + (tp > 1)]), BYTES, "float32", 1)
    sent = [[e.nbytes for e in events if e.name == "attention"] for events in block_events(costs, sequences)]
    chunk, keys = sequences * model.sequence / cp / tp, model.qkv - model.query
    by_heads = [chunk * model.qkv * (cp - 1) / cp, chunk * model.query * (cp - 1) / cp]
    by_queries = [chunk * keys * (cp - 1)]
    divide = kv_heads % (cp * tp) == 0

    if "ulysses" in form and not divide:
        assert "do not divide" in costs.setup.problem(model, sequences)
    elif "ulysses" in form or (divide and sum(by_heads) < sum(by_queries)):
        assert [sorted(nbytes for nbytes in each if nbytes) for each in sent] == [sorted(by_heads)] * 2
    else:
        assert [sum(each) for each in sent] == [sum(by_queries)] * 2


def test_memory_shrinks_by_what_is_shared_out() -> None:
    setup = Setup(form_of("megatron"), (2,), data=4)
    costs = BlockCosts(MODEL, setup, DGX)
    whole = memory_of(costs, SEQUENCES)
    assert whole.weights == MODEL.parameters * 2 // 2
    assert whole.optimizer == MODEL.parameters * 12 // 2
    shared = memory_of(replace(costs, setup=replace(setup, sharded="optimizer")), SEQUENCES)
    assert (shared.optimizer, shared.weights) == (whole.optimizer // 4, whole.weights)
    every = memory_of(replace(costs, setup=replace(setup, sharded="all")), SEQUENCES)
    assert (every.optimizer, every.weights) == (whole.optimizer // 4, whole.weights // 4)
    again = memory_of(replace(costs, setup=replace(setup, recompute=True)), SEQUENCES)
    assert again.activations < whole.activations


def test_a_timeline_is_as_long_as_the_step_says() -> None:
    setup = Setup(form_of("optimus"), (2, 2), data=2)
    for overlap in (False, True):
        slots = timeline(MODEL, setup, DGX, SEQUENCES, overlap=overlap)
        step = simulate_step(MODEL, setup, DGX, SEQUENCES, overlap=overlap)
        assert isclose(makespan(slots), step.seconds)
        assert sum(s.event.nbytes for s in slots) == step.totals.nbytes
        assert all(a.begin >= 0 for a in slots)


def test_overlap_never_takes_longer_and_hides_no_more_than_there_is() -> None:
    events = [Event("a", "forward", "compute", 1.0), Event("b", "forward", "network", 2.0, waits=False)] * 3
    blocking, hidden = (makespan(place_events(events, overlap=overlap)) for overlap in (False, True))
    assert (blocking, hidden) == (9.0, 7.0)


@pytest.mark.parametrize(("rows", "columns", "host"), [(4, 4, 4), (8, 8, 4), (4, 6, 2), (6, 6, 4), (8, 8, 8)])
def test_bunched_hosts_are_blocks(rows: int, columns: int, host: int) -> None:
    """Claim S14: with 4 GPUs a node and q = 4, each column and row of the mesh crosses two nodes, not four."""
    ranks = host_tiles(rows, columns, host)
    assert sorted(ranks) == list(range(rows * columns))
    grid = [ranks[i * columns : (i + 1) * columns] for i in range(rows)]
    rowwise = [range(i * columns, (i + 1) * columns) for i in range(rows)]
    crossed = [len({rank // host for rank in line}) for line in (*grid, *zip(*grid, strict=True))]
    plain = [len({rank // host for rank in line}) for line in zip(*rowwise, strict=True)]
    assert max(crossed) <= max(plain)
    if (rows, columns, host) == (4, 4, 4):
        assert set(crossed) == {2}
        assert set(plain) == {4}


def test_hosts_that_do_not_tile_are_refused() -> None:
    with pytest.raises(MeshError, match="hosts of 4 ranks do not tile a mesh of"):
        host_tiles(3, 3, 4)


def test_constant_efficiency_takes_work_as_the_papers_say() -> None:
    """Claim S10: the work that keeps efficiency grows as p^3 for Megatron and as p^1.5 for SUMMA.

    Efficiency stays where communication over computation does. For Megatron that is p / h, so h grows with p and the
    work h^3 with p^3; for SUMMA with gathers it is sqrt(p) / h (Optimus section 3.1.1 has a log p from its trees).
    """
    ratios = {"megatron": [], "optimus": []}  # type: dict[str, list[float]]
    sizes = [64, 256, 1024]
    for p in sizes:
        q = round(p**0.5)
        for form, shape, hidden in (("megatron", (p,), 64 * p), ("optimus", (q, q), 64 * q)):
            model = Model(1, hidden, p, hidden, head_size=hidden // p)
            setup = Setup(form_of(form), shape)
            events = block_events(BlockCosts(model, setup, BYTES, "float32", 1, exact=False), 256)[0]
            flops = sum(e.flops for e in events if e.name != "attention")
            ratios[form].append(sum(e.nbytes for e in events if e.name != "norm") / flops)
    slopes = {form: log2(found[-1] / found[0]) / log2(sizes[-1] / sizes[0]) for form, found in ratios.items()}
    assert slopes == pytest.approx({"megatron": 0.0, "optimus": 0.0}, abs=0.06)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (Setup(form_of("megatron"), (32,)), "16 heads do not divide among 32 ranks"),
        (Setup(form_of("data"), data=3), "64 sequences at a time do not divide among 3 ranks"),
        (Setup(form_of("data"), stages=3), "4 layers do not divide into 3 stages"),
        (Setup(form_of("data"), microbatches=5), "64 sequences does not divide into 5 microbatches"),
    ],
)
def test_setups_that_cannot_run_say_why(setup: Setup, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        simulate_step(MODEL, setup, DGX, SEQUENCES)


def test_a_width_that_leaves_ranks_without_features() -> None:
    with pytest.raises(ShapeError, match="a width of 4 is less than the 8 ranks that share it"):
        simulate_step(replace(MODEL, ffn=4), Setup(form_of("megatron"), (8,)), DGX, SEQUENCES)
