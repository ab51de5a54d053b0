"""Schedules and their simulator: laws over any stages, microbatches, edges and costs."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import ScheduleError
from dshard.pipeline import (
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Costs,
    Edge,
    EdgeCost,
    Forward,
    Program,
    Receive,
    Send,
    StageCost,
    chain,
    choose,
    edges_of,
    play,
    rank_schedules,
    simulate,
    uniform,
)
from dshard.pipeline.runner import in_one_order

DELAYS = st.one_of(st.none(), st.integers(0, 3))
SECONDS = st.integers(0, 40).map(lambda n: n / 8)
BYTES = st.integers(0, 1000)
UNIT = StageCost(1.0, 1.0, 1.0)


@st.composite
def programs(draw):
    n, m = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    pairs = [(src, dst) for src in range(n) for dst in range(src + 1, n)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4)) if pairs else []
    edges = chain(n) + tuple(Edge("skip", src, dst) for src, dst in skips)
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    return Program(schedule, n, m, edges, draw(DELAYS), draw(st.booleans()), draw(st.integers(1, 4)))


@st.composite
def priced(draw):
    program = draw(programs())
    stage = st.builds(StageCost, SECONDS, SECONDS, SECONDS, BYTES, BYTES, BYTES)
    stages = draw(st.lists(stage, min_size=program.n_stages, max_size=program.n_stages))
    edges = tuple(EdgeCost(edge, draw(SECONDS), draw(BYTES), draw(SECONDS)) for edge in program.edges)
    return program, Costs(tuple(stages), edges)


@given(priced())
def test_no_schedule_waits_forever_and_each_microbatch_runs_once(case):
    program, costs = case

    timeline = simulate(program, costs)

    once = set(range(program.n_microbatches))
    backwards = (Backward,) if program.delay is None else (BackwardInput, BackwardWeight)
    for spans in timeline.spans:
        assert all(a.end <= b.begin for a, b in pairwise(spans))
        count = Counter((type(span.compute), span.compute.microbatch) for span in spans)
        assert count == Counter((kind, k) for kind in (Forward, *backwards) for k in once)
    crossed = Counter((c.edge, c.microbatch) for c in timeline.crossings)
    both = [way for edge in program.edges for way in (edge, edge.back())]
    assert crossed == Counter((edge, k) for edge in both for k in once)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_skip_over_all_stages_never_waits_for_what_comes_after_it(schedule, overlap):
    for n, m in product(range(2, 6), range(1, 12)):
        edges = (*chain(n), Edge("skip", 0, n - 1))
        simulate(Program(schedule, n, m, edges, overlap=overlap), uniform(n, edges, UNIT, seconds=0.5))


@given(priced())
def test_nothing_is_computed_before_what_it_needs(case):
    program, costs = case

    timeline = simulate(program, costs)

    begin = {(s.stage, type(s.compute), s.compute.microbatch): s.begin for spans in timeline.spans for s in spans}
    end = {(s.stage, type(s.compute), s.compute.microbatch): s.end for spans in timeline.spans for s in spans}
    inputs = Backward if program.delay is None else BackwardInput
    for c in timeline.crossings:
        kind = inputs if c.edge.backward else Forward
        assert end[c.edge.src, kind, c.microbatch] <= c.begin
        assert c.begin + costs.of(c.edge).seconds <= c.end <= begin[c.edge.dst, kind, c.microbatch]
    for stage, kind, k in begin:
        if kind is BackwardWeight:
            assert end[stage, BackwardInput, k] <= begin[stage, BackwardWeight, k]
        if kind is inputs:
            assert end[stage, Forward, k] <= begin[stage, inputs, k]


@given(priced())
def test_what_is_in_flight_is_what_the_schedules_promise(case):
    program, costs = case
    n, m = program.n_stages, program.n_microbatches
    promised = {"gpipe": lambda i: m, "1f1b": lambda i: min(m, n - i), "eager-1f1b": lambda i: min(m, 2 * (n - i) - 1)}

    timeline = simulate(program, costs)

    assert [timeline.in_flight(i) for i in range(n)] == [promised[program.schedule](i) for i in range(n)]


@given(priced())
def test_a_signal_of_one_byte_is_never_slower(case):
    program, costs = case

    assert simulate(program, costs.signals()).makespan <= simulate(program, costs).makespan


@given(priced())
def test_at_most_a_window_of_each_edge_is_on_its_way(case):
    """So that a sender may wait for the one before that without ever waiting for long."""
    program, costs = case
    timeline = simulate(program, costs)
    end = {(c.edge, c.microbatch): c.end for c in timeline.crossings}
    inputs = Backward if program.delay is None else BackwardInput

    for spans in timeline.spans:
        for span in spans:
            edges = [] if isinstance(span.compute, BackwardWeight) else program.gives(span.compute, span.stage)
            for edge in edges:
                earlier = span.compute.microbatch - program.window(edge)
                assert isinstance(span.compute, Forward | inputs)
                assert earlier < 0 or end[edge, earlier] <= span.end


@given(st.integers(1, 8), st.integers(1, 20), SECONDS, SECONDS, SECONDS)
def test_equal_stages_take_equally_long_where_communication_is_free(n, m, f, i, w):
    costs = uniform(n, chain(n), StageCost(f, i, w))

    spans = {name: simulate(Program(name, n, m, chain(n)), costs).makespan for name in SCHEDULES}

    assert len(set(spans.values())) == 1
    assert spans["1f1b"] == pytest.approx((m + n - 1) * (f + i + w))


@pytest.mark.parametrize(
    ("n", "m", "seconds", "delay", "one_f_one_b", "eager"),
    [
        (4, 16, 0.5, None, 71, 60),
        (4, 16, 1, None, 85, 63),
        (4, 16, 2, None, 113, 75),
        (8, 32, 1, None, 185, 131),
        (8, 32, 2, None, 253, 159),
        (8, 32, 2, 0, 219, 138),
        (8, 32, 0, None, 117, 117),
        (8, 32, 0, 0, 110, 110),
    ],
)
def test_makespans_of_forward_1_backward_2_with_asynchronous_sends(n, m, seconds, delay, one_f_one_b, eager):
    costs = uniform(n, chain(n), UNIT, seconds=seconds)

    found = [simulate(Program(name, n, m, chain(n), delay), costs).makespan for name in ("1f1b", "eager-1f1b")]

    assert found == [one_f_one_b, eager]


@pytest.mark.parametrize("seconds", [0.25, 0.5, 1.0, 1.5])
def test_eager_hides_all_but_the_first_and_last_transfers_while_two_fit_into_a_forward_and_backward(seconds):
    n, m = 4, 16
    costs = uniform(n, chain(n), UNIT, seconds=seconds)

    makespan = simulate(Program("eager-1f1b", n, m, chain(n)), costs).makespan

    assert makespan == (m + n - 1) * 3 + (n - 1) * 2 * seconds


def test_waiting_for_what_is_sent_costs_more_than_overlap():
    costs = uniform(4, chain(4), UNIT, seconds=0.5)

    found = [simulate(Program("1f1b", 4, 16, chain(4), overlap=overlap), costs).makespan for overlap in (True, False)]

    assert found == [71.0, 74.5]


def test_stages_that_wait_for_each_other_are_named():
    here, there = Edge("x", 0, 1), Edge("x", 1, 0)
    first = (Forward(0), Send(here, 0), Receive(there, 0), Backward(0))
    second = (Forward(0), Send(there, 0), Receive(here, 0), Backward(0))

    with pytest.raises(ScheduleError, match=r"forever: stage 0 at send x 0->1 of microbatch 0; stage 1 at send"):
        play([first, second], uniform(2, [here], UNIT), overlap=False)


def test_a_stage_that_receives_what_nobody_sends_is_named():
    with pytest.raises(ScheduleError, match=r"wait for each other forever: stage 1 at F0"):
        play([[], [Receive(Edge("x", 0, 1), 0), Forward(0)]], uniform(2, chain(2), UNIT))


def test_links_keep_the_order_in_which_was_sent():
    """As an ordered channel between two ranks would: expecting in another order is a deadlock."""
    edge = Edge("x", 0, 1)
    sender = (Forward(0), Send(edge, 0), Forward(1), Send(edge, 1))
    receiver = (Receive(edge, 1), Forward(1), Receive(edge, 0), Forward(0))

    with pytest.raises(ScheduleError, match=r"stage 1 at F1"):
        play([sender, receiver], uniform(2, [edge], UNIT))


def test_memory_is_fixed_activations_and_what_arrives_early():
    stage = StageCost(1, 1, 1, activation=10, kept=4, fixed=100)
    edges = chain(2)

    def peaks(schedule, m, delay=None, ahead=0, nbytes=0):
        timeline = simulate(Program(schedule, 2, m, edges, delay, ahead=ahead), uniform(2, edges, stage, 1.0, nbytes))
        return [timeline.peak_bytes(i) for i in range(2)]

    assert peaks("gpipe", 6) == [160, 160]
    assert peaks("1f1b", 6) == [120, 110]
    assert peaks("eager-1f1b", 6) == [130, 110]
    assert peaks("1f1b", 6, delay=2) == [128, 118]
    assert peaks("1f1b", 6, ahead=2, nbytes=1)[1] == 110 + 2
    assert simulate(Program("gpipe", 2, 6, edges), uniform(2, edges, stage)).fits(160)
    assert not simulate(Program("gpipe", 2, 6, edges), uniform(2, edges, stage)).fits(159)


def test_the_choice_is_the_fastest_that_fits():
    costs = uniform(4, chain(4), StageCost(1, 1, 1, activation=10, kept=5), seconds=1.0)

    free = choose(costs, 16, chain(4))
    tight = choose(costs, 16, chain(4), budget=40, delays=[None])

    assert free.program.schedule == "eager-1f1b"
    assert free.program.delay == 0
    assert free.timeline.makespan == min(c.timeline.makespan for c in rank_schedules(costs, 16, chain(4)))
    assert (tight.program.schedule, tight.peak_bytes) == ("1f1b", 40)
    with pytest.raises(ScheduleError, match=r"within 30 bytes on each rank: the least is 40, with 1f1b; use smaller"):
        choose(costs, 16, chain(4), budget=30, delays=[None])


def test_of_equally_fast_schedules_that_of_least_memory_is_chosen():
    costs = uniform(4, chain(4), StageCost(1, 1, 0, activation=10, kept=5))

    assert choose(costs, 16, chain(4)).program.schedule == "1f1b"
    assert choose(costs, 16, chain(4)).program.delay is None


def test_names_make_edges_to_the_next_taker():
    stages = [(["x"], ["x", "a"]), (["x", "a"], ["x", "b"]), (["x", "mask"], ["x"]), (["x", "a", "b"], ["x"])]

    found = edges_of(stages, batch=["x", "mask"])

    assert set(map(str, found)) == {"a 0->1", "x 0->1", "a 0->3", "x 1->2", "b 1->3", "x 2->3"}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(["x"], ["y"]), (["z"], ["x"])], r"stage 1 takes 'z', which neither an earlier stage gives \(y\)"),
        ([(["x", "x"], ["y"])], r"stage 0 takes x, x: name each value once"),
        ([(["x"], ["y", "y"])], r"stage 0 gives y, y: name each value once"),
    ],
)
def test_names_that_lead_nowhere_are_refused(stages, message):
    with pytest.raises(ScheduleError, match=message):
        edges_of(stages, batch=["x"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Program("2f2b", 2, 2, ()), "there is no schedule '2f2b': use one of gpipe, 1f1b, eager-1f1b"),
        (lambda: Program("1f1b", 2, 0, ()), "a pipeline of 0 microbatches: it needs at least one"),
        (lambda: Program("1f1b", 0, 2, ()), "a pipeline of 0 stages"),
        (lambda: Program("1f1b", 2, 2, (), delay=-1), "neither can be negative"),
        (lambda: Program("1f1b", 2, 2, (Edge("x", 1, 0),)), "must go from a stage to a later one of 2"),
        (lambda: Costs((StageCost(-1.0),)), "none is negative"),
        (lambda: Costs((UNIT,), (EdgeCost(Edge("x", 0, 1)), EdgeCost(Edge("x", 1, 0)))), "an edge has two costs"),
        (lambda: simulate(Program("1f1b", 2, 2, ()), Costs((UNIT,))), "costs of 1 stages for a pipeline of 2"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ScheduleError, match=message):
        build()


@given(priced())
def test_a_timeline_can_be_read_by_machines(case):
    program, costs = case

    timeline = simulate(program, costs)

    events = [e for e in json.loads(timeline.to_chrome())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == sum(map(len, timeline.spans)) + len(timeline.crossings)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.makespan * 1e6)
    assert json.loads(json.dumps(timeline.data()))["makespan"] == timeline.makespan


# -- messages in one order, as NCCL asks


def messages(actions):
    """The messages among actions, whether sent or received."""
    return [(action.edge, action.microbatch) for action in actions if isinstance(action, Receive | Send)]


def run_one_by_one(stages):
    """Run the actions of stages each of which waits for the end of every action: a message takes both ends at once.

    Returns the number of actions that are left where all stages wait for each other.
    """
    left = [list(reversed(actions)) for actions in stages]
    moved = True
    while moved:
        moved = False
        for stage, todo in enumerate(left):
            while todo and not messages(todo[-1:]):
                todo.pop()
                moved = True
            for item in messages(todo[-1:]):
                peer = left[item[0].dst if item[0].src == stage else item[0].src]
                if messages(peer[-1:]) == [item]:
                    todo.pop()
                    peer.pop()
                    moved = True
    return sum(map(len, left))


@given(programs())
def test_stages_begin_their_messages_in_one_order_and_never_wait_in_a_circle(program):
    ordered = in_one_order(program)

    for stage, actions in enumerate(ordered):
        assert Counter(actions) == Counter(program.actions(stage))
        own = [
            [action for action in each if not isinstance(action, Receive)] for each in (actions, program.actions(stage))
        ]
        assert own[0] == own[1]
        for other in range(stage):
            pair = {stage, other}
            here, there = (
                [item for item in messages(ordered[i]) if {item[0].src, item[0].dst} == pair] for i in (stage, other)
            )
            assert here == there
    assert run_one_by_one(ordered) == 0


def test_receives_posted_early_would_wait_in_a_circle_if_stages_waited_for_every_action():
    program = Program("1f1b", 2, 4, chain(2))

    assert run_one_by_one([program.actions(stage) for stage in range(2)]) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0])
def test_one_order_of_messages_costs_no_time_and_no_more_memory(schedule, seconds):
    program = Program(schedule, 4, 8, chain(4))
    costs = uniform(4, chain(4), StageCost(activation=2), seconds, nbytes=1)

    early, ordered = simulate(program, costs), play(in_one_order(program), costs)

    assert ordered.makespan == early.makespan
    assert all(ordered.peak_bytes(stage) <= early.peak_bytes(stage) for stage in range(4))
