"""Closed forms of a schedule of a product: the messages that a rank receives, and what it holds at once."""

from __future__ import annotations

from math import prod

from dshard import Mesh, Schedule
from dshard.rules.matmul_loops import Loop, Stored


def messages(schedule: Schedule, mesh: Mesh) -> int:
    """Messages that each rank receives: a ring along every axis on which a tensor moves, two to all_reduce C.

    Of plans that move the schedule's volume none has fewer: an axis of g ranks takes g - 1 messages by itself, and more
    together with another. Where the start of a collective costs more than a message, one over both may be cheaper.
    """
    axes = zip(mesh.shape, schedule.loops, schedule.stored, strict=True)
    return sum((n - 1) * _rings(loop, stored) for n, loop, stored in axes)


def peak(schedule: Schedule, mesh: Mesh, m: int, k: int, n: int) -> float:
    """The most elements that a rank holds at once beside its stored operands, where all sizes divide.

    A gathered operand stays, for the backward pass may need it, and so does the result until it is reduced. To
    gather along columns takes a second copy, as the chunks are not contiguous. A reduce_scatter over g ranks
    receives g chunks and adds them to one; to scatter columns they are first copied into rows; an all_reduce takes
    one copy. Gloo's collectives that fill a buffer in place take just this; small ones take one copy more.
    """
    over_m, over_n, over_k = (prod(_sizes(schedule, mesh, loop)) for loop in ("m", "n", "k"))
    a, b, c = m * k / (over_m * over_k), k * n / (over_k * over_n), m * n / (over_m * over_n)
    most, held = 0.0, 0.0
    parts_of_a = _sizes(schedule, mesh, "n", "m"), _sizes(schedule, mesh, "n", "k")
    parts_of_b = _sizes(schedule, mesh, "m", "k"), _sizes(schedule, mesh, "m", "n")
    for elements, (by_row, by_column) in ((a, parts_of_a), (b, parts_of_b)):
        most = max(most, held + elements * _gathering(by_row, by_column))
        held += elements * (prod((*by_row, *by_column)) > 1)
    return max(most, held + c * (1 + _reducing(schedule, mesh, m, n)))


def _reducing(schedule: Schedule, mesh: Mesh, m: int, n: int) -> float:
    """The buffers of C's reduction, as a multiple of the C that a rank computes.

    Sums over several axes that end replicated are reduce-scattered first, by rows unless there is a reason for columns.
    """
    rows, columns, everywhere = (_sizes(schedule, mesh, "k", stored) for stored in ("m", "n", "R"))
    if everywhere and not rows and len(everywhere) + len(columns) > 1:
        by_column = not columns and set(schedule.loops) == {"k"} and n > m
        rows, columns = ([], everywhere) if by_column else ([max(everywhere)], columns)
    if rows:
        return 1 + 1 / rows[0]
    return 2.0 if columns else float(bool(everywhere))


def _rings(loop: Loop, stored: Stored) -> int:
    """The number of rings that run along one axis: none, one, or two for an all_reduce."""
    if stored == "P" or (stored == "R" and loop != "k"):
        return 0
    return 2 if stored == "R" else 1


def _gathering(rows: list[int], columns: list[int]) -> float:
    """The buffers of a gather beside its operand, as a multiple of its result; the first axis is gathered last."""
    if rows:
        return 1 + 1 / rows[0] if len(rows) + len(columns) > 1 else 1.0
    return 2.0 if columns else 0.0


def _sizes(schedule: Schedule, mesh: Mesh, loop: Loop, *stored: Stored) -> list[int]:
    """The sizes above one of the mesh axes with this loop, and with one of these storages if any are given."""
    return [
        size
        for size, mine, where in zip(mesh.shape, schedule.loops, schedule.stored, strict=True)
        if size > 1 and mine == loop and (not stored or where in stored)
    ]
