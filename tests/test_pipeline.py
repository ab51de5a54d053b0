"""Pipelines on real ranks: losses and gradients are those of one device, whatever the schedule and the layouts."""

from __future__ import annotations

import pytest
from pipeline_models import LOSS, Where, errors, staged

from dshard.pipeline import SCHEDULES, Pipeline
from dshard.testing import rank_pool

TWO = (Where((0, 1), (2,), "data"), Where((2, 3), (2,), "tensor"))
UNEVEN = (Where((3,), (1,), "replicated"), Where((2, 0, 1), (3,), "data"))
FOUR = tuple(Where((rank,), (1,), "replicated") for rank in range(4))
EIGHT = {
    "two": (Where((0, 1, 2, 3), (2, 2), "both"), Where((4, 5, 6, 7), (4,), "data")),
    "grid": (Where((7, 6, 5, 4), (4,), "data"), Where((0, 1, 2, 3), (2, 2), "both")),
    "four": tuple(Where((2 * i, 2 * i + 1), (2,), s) for i, s in enumerate(["data", "tensor", "replicated", "data"])),
    "steps": (
        Where((0,), (1,), "replicated"),
        Where((1, 2), (2,), "tensor"),
        Where((3, 4, 5, 6), (2, 2), "both"),
        Where((7,), (1,), "data"),
    ),
}
SOME = [
    ("1f1b", None, True),
    ("eager-1f1b", 0, True),
    ("gpipe", None, False),
]
ALL = [(name, delay, overlap) for name in SCHEDULES for delay in (None, 0, 1) for overlap in (True, False)]


def trained(model, wheres, options, n_microbatches):
    """The largest errors of the second of two steps, for each way of running: the first step tells shapes."""
    found = []
    for schedule, delay, overlap in options:
        stages = staged(model, wheres)
        pipeline = Pipeline(
            stages, n_microbatches=n_microbatches, schedule=schedule, loss=LOSS[model], delay=delay, overlap=overlap
        )
        found += [*errors(pipeline, model), *errors(pipeline, model)]
    return max(found)


@pytest.mark.ranks
@pytest.mark.parametrize("model", ["u", "gpt"])
@pytest.mark.parametrize("wheres", [TWO, UNEVEN, FOUR], ids=["two", "uneven", "four"])
def test_losses_and_gradients_are_those_of_one_device(ranks, model, wheres):
    assert max(ranks.run(trained, model, wheres, SOME, 3)) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["u", "gpt"])
@pytest.mark.parametrize("wheres", EIGHT.values(), ids=EIGHT)
@pytest.mark.parametrize("n_microbatches", [1, 2, 6])
def test_every_schedule_on_eight_ranks(model, wheres, n_microbatches):
    assert max(rank_pool(8).run(trained, model, wheres, ALL, n_microbatches, timeout=500)) < 1e-12
