"""The host's time for distributed operators, counted equally by calibration, recorded steps and closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dshard import Mesh
from dshard.comm import listen
from dshard.simulate import Model, Setup, form_of, record, simulate_step
from dshard.simulate.block_program import operators_of, operators_of_phases, program_on
from dshard.topology import Topology

CPU = Topology.preset("cpu")
EACH = 1e-3


def taking(seconds: float, in_place: float = 0.0, launch: float = 0.0) -> Topology:
    return replace(CPU, device=replace(CPU.device, dispatch=seconds, in_place=in_place, launch=launch))


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)])
def test_the_program_that_is_timed_sends_nothing_and_asks_the_same_of_every_mesh(shape: tuple[int, ...]) -> None:
    program, sent = program_on(Mesh(shape), "meta"), []
    program.step()

    with listen(sent.append):
        count = operators_of(program.step)

    assert sent == []
    assert count.making == sum(phase.making for phase in operators_of_phases())
    assert count.writing == sum(phase.writing for phase in operators_of_phases())


def test_a_recorded_step_takes_that_of_its_operators_longer_and_no_launches_with_it() -> None:
    program = program_on(Mesh((4,)), "meta")
    times = ((0.0,), (EACH,), (EACH, 0.0, 5 * EACH), (0.0, EACH))
    without, within, launched, writing = (record(program.step, taking(*each)) for each in times)

    count = operators_of(program.step)
    assert within.seconds - without.seconds == pytest.approx(count.making * EACH)
    assert writing.seconds - without.seconds == pytest.approx(count.writing * EACH)
    assert launched.seconds == pytest.approx(within.seconds)
    assert (within.flops, within.nbytes, within.peak) == (without.flops, without.nbytes, without.peak)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_closed_form_takes_those_of_each_block_longer(recompute: bool) -> None:
    model = Model(layers=4, hidden=64, heads=4, sequence=16)
    setup = Setup(form_of("megatron"), (4,), stages=2, microbatches=2, recompute=recompute)
    figures = ((0.0,), (EACH,), (0.0, EACH))
    without, within, written = (simulate_step(model, setup, taking(*each), 8, overlap=False) for each in figures)
    forward, backward, update = operators_of_phases()

    times = 2 if recompute else 1
    making, writing = (
        3 * (getattr(forward, kind) * times + getattr(backward, kind)) + getattr(update, kind)
        for kind in ("making", "writing")
    )  # two microbatches through two stages take three turns
    assert within.seconds - without.seconds == pytest.approx(making * EACH * model.layers / 2)
    assert written.seconds - without.seconds == pytest.approx(writing * EACH * model.layers / 2)
    assert within.totals.network == without.totals.network


def test_bytes_alone_take_no_host() -> None:
    found = taking(EACH, EACH).bytes_only()

    assert (found.dispatch, found.in_place) == (0.0, 0.0)
