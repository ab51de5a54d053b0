"""The host's time for distributed operators, counted equally by calibration and recorded steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dshard import Mesh
from dshard.comm import listen
from dshard.simulate import record
from dshard.tools.calibrate.block_program import operators_of, program_on
from dshard.topology import Topology

CPU = Topology.preset("cpu")
EACH = 1e-3


def taking(seconds: float, in_place: float = 0.0, launch: float = 0.0) -> Topology:
    return replace(CPU, device=replace(CPU.device, dispatch=seconds, in_place=in_place, launch=launch))


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)])
def test_the_program_that_is_timed_sends_nothing_and_asks_the_same_of_every_mesh(shape: tuple[int, ...]) -> None:
    programs, sent = [program_on(Mesh(each), "meta") for each in (shape, (1,))], []
    for program in programs:
        program.step()

    with listen(sent.append):
        count, alone = (operators_of(program.step) for program in programs)

    assert sent == []
    assert count == alone


def test_a_recorded_step_takes_that_of_its_operators_longer_and_no_launches_with_it() -> None:
    program = program_on(Mesh((4,)), "meta")
    times = ((0.0,), (EACH,), (EACH, 0.0, 5 * EACH), (0.0, EACH))
    without, within, launched, writing = (record(program.step, taking(*each)) for each in times)

    count = operators_of(program.step)
    assert within.seconds - without.seconds == pytest.approx(count.making * EACH)
    assert writing.seconds - without.seconds == pytest.approx(count.writing * EACH)
    assert launched.seconds == pytest.approx(within.seconds)
    assert (within.flops, within.nbytes, within.peak) == (without.flops, without.nbytes, without.peak)


def test_bytes_alone_take_no_host() -> None:
    found = taking(EACH, EACH).bytes_only()

    assert (found.dispatch, found.in_place) == (0.0, 0.0)
