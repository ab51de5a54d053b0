"""Measure the local work of one rank while all ranks compute, since they may share cores and memory."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial

import torch

from dshard.comm import transport
from dshard.tools.calibrate.block_program import operators_of, program_on
from dshard.tools.calibrate.rounds import Clock, typical
from dshard.topology import Device

SIDE = {"cpu": 384, "cuda": 8192}
COPIED = {"cpu": 1 << 22, "cuda": 1 << 28}
LEAST_SENT = 1 << 16
"""Bytes that a rank sends while it works, or more where they take less than a window."""
WINDOW = 0.04
"""Seconds for which each kind of work is repeated, so that ranks that share a core have had it in turn."""
LEAST_REPEATS, SHARE = 3, 0.015
"""Windows of each kind of work: at least so many, and no more than each takes this share of the seconds to measure."""


def measure_device(clock: Clock, seconds: float = 0.0) -> Device:
    """Measure the slowest rank's matmul rate for each dtype, copy rate, and seconds to launch an operation.

    `seconds` are those to measure for, of which this takes about a tenth. Products are those of a linear layer and of
    its two gradients: with one operand transposed, or the other, they do not all run equally fast.
    """
    device = clock.device
    side, copied = (table.get(device.type, table["cpu"]) for table in (SIDE, COPIED))
    small, large = torch.ones(1, device=device), torch.ones(copied, dtype=torch.uint8, device=device)
    repeats = max(LEAST_REPEATS, int(seconds * SHARE / WINDOW))
    launch = _each(clock, small.clone, repeats)
    copy = _each(clock, large.clone, repeats)
    rates, alone = [], 1.0
    for dtype in _dtypes(device):
        x, w, grad = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(3))
        work = partial(_linear_and_back, x, w, grad)
        took = _each(clock, work, repeats)
        rates.append((str(dtype).removeprefix("torch."), 2 * side**3 / _beyond(took / 3, launch)))
        if len(rates) == 1 and device.type == "cpu" and clock.mesh.size > 1:
            alone = min(1.0, _each(clock, work if clock.everyone.index == 0 else None, repeats) / took)
    memory = 2 * copied / _beyond(copy, launch)
    overlap = measure_overlap(clock, repeats)
    return Device(
        name_of(device), tuple(rates), memory, launch, *measure_dispatch(clock, repeats), alone=alone, overlap=overlap
    )


def measure_overlap(clock: Clock, repeats: int = LEAST_REPEATS) -> float:
    """Measure the part of a collective's seconds in which work beside it goes on as without it; 1 on one rank.

    An all_gather and products that take about as long run one after the other, and beside each other.
    """
    n, device, group = clock.mesh.size, clock.device, clock.everyone
    if n == 1:
        return 1.0
    side = SIDE.get(device.type, SIDE["cpu"])
    x, w, grad = (torch.ones(side, side, device=device) for _ in range(3))
    parts = torch.ones(COPIED.get(device.type, COPIED["cpu"]) // 4, device=device)
    number, products = LEAST_SENT // 4, 1

    def begin() -> Callable[[], object]:
        return transport.begin_all_gather(parts[:number], [number] * n, group)

    def send() -> None:
        begin()()

    def work() -> None:
        for _ in range(products):
            _linear_and_back(x, w, grad)

    def both() -> None:
        wait = begin()
        work()
        wait()

    number = min(parts.numel(), int(number * max(1.0, WINDOW / _slowest(clock, send, repeats))))
    products = max(1, round(_slowest(clock, send, repeats) / _slowest(clock, work, repeats)))
    sending, working, together = (_slowest(clock, call, repeats) for call in (send, work, both))
    return min(1.0, max(0.0, (sending + working - together) / min(sending, working)))


def _slowest(clock: Clock, call: Callable[[], object], repeats: int) -> float:
    """Return the slowest rank's typical seconds for a call in which all ranks take part."""
    return clock.slowest([typical([clock.seconds(call, before=call) for _ in range(repeats)])])[0]


def measure_dispatch(clock: Clock, repeats: int = LEAST_REPEATS) -> tuple[float, float]:
    """Measure the host's seconds for one distributed operator, and for one that writes to its operand.

    The means over a small program on replicated tensors, so that nothing is sent: over its forward and
    backward pass, and over the rest of its optimiser. 0 on an accelerator, which is given its work ahead of time.
    """
    if clock.device.type != "cpu":
        return 0.0, 0.0
    program = program_on(clock.mesh)
    program.step()
    passes, update = operators_of(program.passes), operators_of(program.update)
    dispatch = _each(clock, program.passes, repeats) / (passes.making + passes.writing)
    return dispatch, max(0.0, _each(clock, program.update, repeats) - update.making * dispatch) / update.writing


def _linear_and_back(x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> None:
    x @ w.T, grad @ w, grad.T @ x


def name_of(device: torch.device) -> str:
    """The name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    wide = (torch.float32, torch.float64)
    return (torch.bfloat16, torch.float16, *wide) if device.type == "cuda" else wide


def _each(clock: Clock, work: Callable[[], object] | None, repeats: int) -> float:
    """Return the slowest rank's typical seconds for one run of `work`; a rank with None only waits for the others."""
    if work is not None:
        work()
    return clock.slowest([typical([_window(clock, work) for _ in range(repeats)])])[0]


def _window(clock: Clock, work: Callable[[], object] | None) -> float:
    if work is None:
        clock.seconds(lambda: None)
        return 0.0
    done = 0

    def repeat() -> None:
        nonlocal done
        end = time.perf_counter() + WINDOW
        while not done or time.perf_counter() < end:
            work()
            done += 1
            if done % 64 == 0 or done & (done - 1) == 0:  # often at first: a GPU is given its work long before it ends
                clock.synchronize()

    return clock.seconds(repeat) / done


def _beyond(seconds: float, launch: float) -> float:
    """Subtract the launch from `seconds`, leaving at least half of them."""
    return max(seconds - launch, seconds / 2)
