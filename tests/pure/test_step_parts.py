"""The parts of a step that an owner can run, of steps written by hand."""

from __future__ import annotations

from dshard.parallel.step_parts import SeenFunction, SeenTensor, StepPart, step_parts

GIVEN = {0: 64, 1: 64}  # a parameter and its gradient: bytes by memory


def seen(number: int, nbytes: int, memory: int | None = None) -> SeenTensor:
    return SeenTensor(number, number if memory is None else memory, (), 1, nbytes, None)


P, G, CAST, NORM, PRODUCT = seen(0, 64), seen(1, 64), seen(2, 32), seen(3, 2), seen(4, 32)


def reads(name: str, *operands: SeenTensor, makes: SeenTensor) -> SeenFunction:
    made = frozenset({makes.memory} - {x.memory for x in operands})
    return SeenFunction(name, operands, (makes,), made, frozenset(), None)


def writes(name: str, to: SeenTensor, *operands: SeenTensor) -> SeenFunction:
    return SeenFunction(name, (to, *operands), (to,), frozenset(), frozenset({to.memory}), None)


def shape_of(x: SeenTensor) -> SeenFunction:
    return SeenFunction("size", (x,), (), frozenset(), frozenset(), None)


STEP = [
    reads("cast", G, makes=CAST),
    reads("norm", CAST, makes=NORM),
    writes("div_", CAST, NORM),
    shape_of(CAST),
    reads("matmul", CAST, CAST, makes=PRODUCT),
    writes("mul_", P),
    writes("add_", P, PRODUCT),
]


def test_a_part_begins_and_ends_with_the_fewest_bytes() -> None:
    found = step_parts(STEP, GIVEN, [4])

    assert found is not None
    assert found.parts == (StepPart((1, 2, 4), (CAST,), (PRODUCT,)),)
    assert found.late == {6}


def test_what_others_read_is_no_part() -> None:
    found = step_parts([*STEP, writes("sub_", P, NORM)], GIVEN, [4])

    assert found is not None
    assert found.parts == (StepPart((4,), (CAST,), (PRODUCT,)),)
    assert found.late == {6, 7}


def test_a_smaller_result_ends_a_part_and_a_larger_one_does_not() -> None:
    small, large = seen(5, 8), seen(6, 128)
    for last, functions in ((small, (1, 2, 4, 6)), (large, (1, 2, 4))):
        step = [*STEP[:6], reads("tail", PRODUCT, makes=last), writes("add_", P, last)]
        found = step_parts(step, GIVEN, [4])
        assert found is not None
        assert found.parts[0].functions == functions
        assert found.late == {6, 7} - {*functions}


def test_products_of_what_a_state_keeps_are_no_parts() -> None:
    second = seen(5, 32)
    step = [*STEP, reads("matmul", P, PRODUCT, makes=second), writes("add_", P, second)]
    assert step_parts(step, GIVEN, [4, 7]) is None


def test_a_part_that_writes_to_what_others_see_is_refused() -> None:
    view, out = seen(5, 32, CAST.memory), seen(6, 32)
    written = [
        *STEP[:2],
        reads("view", CAST, makes=view),
        reads("matmul", view, makes=PRODUCT),
        writes("div_", CAST, PRODUCT),
    ]
    step = [*written, reads("matmul", view, CAST, makes=out), writes("add_", P, out)]
    assert step_parts(step, GIVEN, [3, 5]) is None
