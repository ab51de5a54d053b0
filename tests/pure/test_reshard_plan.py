"""Plans between meshes: who sends what to whom, and when; the paper's nine cases at their lower bound."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations, product
from math import prod
from random import Random

import pytest
from helpers.reshard_cases import TABLE, Case, case_of, meshes_of, paper_network, reshards
from hypothesis import given
from hypothesis import strategies as st

from dshard import Layout, LayoutError, Mesh, MeshError, Partial, Replicate, Shard, Topology, TopologyError
from dshard.layout import overlap
from dshard.redistribute.step import numel
from dshard.reshard import ReshardPlan, plan_reshard, tasks
from dshard.reshard.chains import FORMS, drafts, forms_of, host_network_of, reduced_axes, region_of
from dshard.reshard.order import Use, best, chains_seconds, greedy, in_depth, in_order, scheduled
from dshard.reshard.reshard_plan import BASELINES, _plan, baseline_seconds, lower_bound, needy_hosts

PUBLISHED = {
    "1": (2.0, 0.5, 0.5, 0.5),
    "2": (2.0, 0.5, 1.0, 0.5),
    "3": (2.0, 0.5, 0.75, 0.75),
    "4": (0.5, 0.5, 0.9375, 0.9375),
    "5": (2.0, 0.5, 1.0, 0.75),
    "6": (2.0, 0.5, 1.0, 1.0),
    "7": (8.0, 8.0, 1.0, 1.0),
    "8": (8.0, 8.0, 1.0, 1.0),
    "9": (2.0, 0.5, 0.75, 0.75),
}
"""Makespans of `BASELINES`, in units of the whole tensor over one network card."""


def unit(case: Case) -> float:
    """Seconds of the whole tensor over one card."""
    return prod(case[2]) * 4.0


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_cases_end_at_the_lower_bound(name: str) -> None:
    case = case_of(name)

    found = plan_reshard(*case, 4, paper_network())

    expected = 1.0 if name[0] in "78" else 0.5
    assert found.bound / unit(case) == pytest.approx(expected)
    assert found.makespan == pytest.approx(found.bound)
    assert found.ratio == pytest.approx(1.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_strategies_take_what_they_are_known_to_take(name: str) -> None:
    case = case_of(name)

    found = [baseline_seconds(baseline, *case, 4, paper_network()) / unit(case) for baseline in BASELINES]

    assert found == pytest.approx(PUBLISHED[name])


@pytest.mark.parametrize("name", TABLE)
def test_a_slice_crosses_once_for_each_host_that_needs_it(name: str) -> None:
    src, dst, shape = case_of(name)
    topology = paper_network()

    crossing = sum(plan_reshard(src, dst, shape, 4, topology).crossing().values())

    hosts, network = dst.mesh.shape[0] if name[0] in "78" else 1, host_network_of(topology)
    slices = [(numel(task.region), len(needy_hosts(task, network))) for task in tasks(src, dst, shape)]
    assert crossing == hosts * prod(shape) * 4 == 4 * sum(size * needy for size, needy in slices)


# -- any plan


NETWORKS = (
    paper_network(2),
    paper_network(4, cards=4),
    Topology.flat(1e9, 1e-5),
    Topology.preset("cpu", nodes=2, ranks=4),
    Topology.preset("dgx-h100", nodes=1),
)
plans = st.tuples(reshards(meshes_of(8)), st.sampled_from(NETWORKS))


def planned(case: Case, topology: Topology) -> ReshardPlan:
    return plan_reshard(*case, 8, topology)


@given(plans)
def test_each_receiver_gets_each_element_once(drawn: tuple[Case, Topology]) -> None:
    case, topology = drawn
    found = planned(case, topology)

    for rank in found.dst.mesh.ranks:
        needed, held = (region_of(layout, found.shape, rank) for layout in (found.chains_dst, found.chains_src))
        wanted = Counter(_elements(needed)) if needed is not None else Counter()
        if held is not None and not reduced_axes(found.chains_src):
            wanted = Counter(dict.fromkeys(wanted.keys() - set(_elements(held)), 1))
        got: Counter[tuple[int, ...]] = Counter()
        for chain in found.chains:
            inside = needed is not None and overlap(chain.region, needed) == chain.region
            if rank in chain.receivers or (chain.terms > 1 and inside and rank == chain.ranks[chain.terms - 1]):
                got.update(list(_elements(chain.region))[chain.span.start : chain.span.stop])
        assert got == wanted


@given(plans)
def test_each_chain_begins_with_those_who_hold_it(drawn: tuple[Case, Topology]) -> None:
    case, topology = drawn
    found = planned(case, topology)

    for chain in found.chains:
        partial_axes = reduced_axes(found.chains_src)
        terms = prod(found.chains_src.mesh.shape[axis] for axis in partial_axes)
        assert chain.terms == terms
        heads = [found.chains_src.mesh.coordinate(rank) for rank in chain.ranks[:terms]]
        assert len({tuple(at[axis] for axis in partial_axes) for at in heads}) == terms
        for rank in chain.ranks[:terms]:
            held = region_of(found.chains_src, found.shape, rank)
            assert held is not None
            assert overlap(chain.region, held) == chain.region
        assert [i for piece in chain.pieces() for i in piece] == list(chain.span)


@given(plans)
def test_no_plan_ends_before_its_bound(drawn: tuple[Case, Topology]) -> None:
    found = planned(*drawn)

    assert found.makespan >= found.bound * (1 - 1e-9)
    assert found.seconds >= found.makespan * (1 - 1e-9)


@given(plans)
def test_no_form_for_all_tasks_is_cheaper(drawn: tuple[Case, Topology]) -> None:
    case, topology = drawn
    found = planned(case, topology)
    network = host_network_of(topology)
    expected = tasks(found.chains_src, found.chains_dst, found.shape)
    around = sum(plan.seconds for plan in (found.first, found.last) if plan is not None)

    for form in FORMS:
        mixed = [
            draft
            for i, task in enumerate(expected)
            for draft in drafts(
                task, form if form in forms_of(task, network) else forms_of(task, network)[0], network, i
            )
        ]
        chains, _ = scheduled(mixed, 8, network, found.bound, 0)
        assert found.seconds <= (around + chains_seconds(chains, 8, network)) * (1 + 1e-9)


@given(plans)
def test_a_plan_is_the_same_each_time(drawn: tuple[Case, Topology]) -> None:
    found = planned(*drawn)

    again = _plan.__wrapped__(found.src, found.dst, found.shape, 8, drawn[1], 0)  # past the cache

    assert again is found  # equal plans are one object


def _elements(region: tuple[range, ...]) -> product[tuple[int, ...]]:
    return product(*region)


# -- schedules


@st.composite
def jobs(draw: st.DrawFn, most: int = 4) -> list[list[Use]]:
    """Chains from one of some hosts to one of some others, of whole seconds."""
    found: list[list[Use]] = []
    for _ in range(draw(st.integers(1, most))):
        seconds, to = float(draw(st.integers(1, 5))), draw(st.integers(10, 12))
        senders = draw(st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True))
        found.append([{(sender, "tx"): seconds, (to, "rx"): seconds} for sender in senders])
    return found


@given(jobs())
def test_the_search_in_depth_finds_the_best_schedule(uses: list[list[Use]]) -> None:
    heads = [range(len(job)) for job in uses]
    every = min(
        in_order(uses, [(job, chosen[job]) for job in order]).makespan
        for order in permutations(range(len(uses)))
        for chosen in product(*heads)
    )

    found = in_depth(uses, in_order(uses, [(job, 0) for job in range(len(uses))]), 0.0)

    assert found.makespan == every
    assert best(uses, 0.0, seed=0).makespan == every


@given(jobs(most=12), st.integers(0, 9))
def test_a_greedy_schedule_uses_no_card_twice_at_a_time(uses: list[list[Use]], seed: int) -> None:
    found = greedy(uses, Random(seed), noise=0.5)

    assert sorted(job for job, _ in found.choices) == list(range(len(uses)))
    spans: dict[object, list[tuple[float, float]]] = {}
    for (job, head), start in zip(found.choices, found.starts, strict=True):
        for resource, seconds in uses[job][head].items():
            spans.setdefault(resource, []).append((start, start + seconds))
    for busy in spans.values():
        busy.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(busy))
    assert found.makespan == max(end for busy in spans.values() for _, end in busy)


def test_uneven_slices_count_with_their_true_sizes() -> None:
    src, dst, shape = case_of("6 uneven")

    sizes = [numel(task.region) // (1024 * 512) for task in tasks(src, dst, shape)]

    assert sizes == [342, 170, 172, 340]


# -- forms


def test_several_cards_share_a_slice() -> None:
    src = Layout(Mesh((4,)), (Replicate(),))
    dst = Layout(Mesh((2, 4), ranks=tuple(range(4, 12))), (Replicate(), Replicate()))
    topology = paper_network(4, cards=4)

    found = plan_reshard(src, dst, (64, 64), 4, topology)

    assert {chain.form for chain in found.chains} == {"multi_rail"}
    assert found.makespan == pytest.approx(64 * 64 * 4 / 4)
    assert found.makespan == pytest.approx(found.bound)


def test_a_partial_sum_is_added_up_on_the_way_where_that_is_cheaper() -> None:
    src = Layout(Mesh((2, 2)), (Replicate(), Partial()))
    dst = Layout(Mesh((2, 2), ranks=(4, 5, 6, 7)), (Shard(0), Replicate()))
    topology = Topology.preset("cpu", nodes=4, ranks=2)

    found = plan_reshard(src, dst, (2048, 2048), 4, topology)
    half = plan_reshard(src, dst, (2048, 2048), 2, topology)

    assert found.first is None
    assert {chain.terms for chain in found.chains} == {2}
    assert found.makespan == pytest.approx(found.bound)
    assert half.first is not None  # a travelling sum would be rounded at every rank


def test_what_a_receiver_holds_is_not_sent() -> None:
    src = Layout(Mesh((4,)), (Shard(0),))
    dst = Layout(Mesh((2,), ranks=(1, 2)), (Shard(0),))

    found = plan_reshard(src, dst, (8,), 4, Topology.flat(1.0))

    assert {(chain.region[0], chain.ranks) for chain in found.chains} == {(range(2), (0, 1)), (range(6, 8), (3, 2))}


def test_a_plan_prints() -> None:
    src, dst, _ = case_of("6")

    text = str(plan_reshard(src, dst, (12, 2, 2), 4, paper_network()))

    assert text.splitlines()[0].startswith("host:S(0) gpu:R on (host=2 gpu=4)  ->  host:S(0) gpu:R on (host=3 gpu=4)")
    assert "[0:4,0:2,0:2]  64 B  0>8>9>10>11" in text
    assert text.splitlines()[-1].endswith("1.00 of the lower bound")


# -- refused


def test_other_devices_are_refused() -> None:
    src = Layout(Mesh((2,)), (Replicate(),))
    dst = Layout(Mesh((2,), device_type="cuda"), (Replicate(),))

    with pytest.raises(MeshError, match=r"on cpu to the mesh \(d0=2\) on cuda: move the local tensors"):
        plan_reshard(src, dst, (4,), 4, Topology.flat(1.0))


def test_a_dim_that_is_not_there_is_refused() -> None:
    src, dst = Layout(Mesh((2,)), (Replicate(),)), Layout(Mesh((3,)), (Shard(1),))

    with pytest.raises(LayoutError):
        plan_reshard(src, dst, (4,), 4, Topology.flat(1.0))


def test_ranks_that_the_topology_has_not_are_refused() -> None:
    src, dst = Layout(Mesh((2,)), (Replicate(),)), Layout(Mesh((2,), ranks=(2, 9)), (Replicate(),))

    with pytest.raises(TopologyError, match="rank 9"):
        plan_reshard(src, dst, (4,), 4, Topology.flat(1.0, ranks=4))


def test_the_bound_counts_slices_that_only_some_hosts_hold() -> None:
    src = Layout(Mesh((2, 1), ranks=(0, 2)), (Replicate(), Replicate()))
    dst = Layout(Mesh((2, 1), ranks=(4, 6)), (Shard(0), Replicate()))

    assert lower_bound(tasks(src, dst, (8,)), 1, host_network_of(paper_network(2))) == 4.0
