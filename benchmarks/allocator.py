"""What torch's allocator for CPUs has given out, as its profiler hears of it."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable

import torch


def peaks(steps: dict[str, Callable[[], object]], before: Callable[[], object] | None = None) -> dict[str, int]:
    """The most bytes given out at once in each of the steps, which run in turn, of all since `before` was called.

    Buffers that a thread of the backend frees last are not heard of as freed: they count until their memory is given
    out again. So the least of several steps is the figure to take.
    """
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        if before is not None:
            before()
        for name, step in steps.items():
            with torch.profiler.record_function(f"peaks of {name}"):
                step()
    waiting, events = [*profile.profiler.kineto_results.experimental_event_tree()], []
    while waiting:
        events.append(waiting.pop())
        waiting += events[-1].children
    held, total, now, most = dict[int, int](), 0, "", defaultdict[str, int](int)
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.name.startswith("peaks of "):
            now = event.name.removeprefix("peaks of ")
        elif event.name == "[memory]":
            fields = event.extra_fields
            total -= held.pop(fields.ptr, 0)
            if fields.alloc_size > 0:
                held[fields.ptr] = fields.alloc_size
                total += fields.alloc_size
        most[now] = max(most[now], total)
    return {name: most[name] for name in steps}
