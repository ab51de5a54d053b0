"""explain, trace and strict tell one story: what is explained is what runs, and strict refuses what nobody asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from operator_samples import SAMPLES
from told_programs import LAYOUTS, MESH, PROGRAMS, SHAPE
from torch import Tensor

from dshard import Layout, LayoutError, Mesh, explain, strict, trace
from dshard.ops.moving import replace_leaves
from dshard.testing import distribute, simulated
from dshard.testing.choices import layouts_of

THOROUGH = settings().max_examples > 100
Make = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
REFUSED = "which strict() forbids"


def disagreements(function: Callable[..., Any], make: Make) -> list[str]:
    """Where explain, trace and strict tell different stories of a call; `make` gives its arguments anew each time."""

    def call(run: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        args, kwargs = make()
        return run(function, *args, **kwargs)

    with trace() as sent:
        try:
            call(lambda f, *args, **kwargs: f(*args, **kwargs))
        except Exception:  # it is refused with or without being watched
            return []
    report = call(explain)
    return [*_explained(report, sent.events), *_refused(call, sent.events)]


def _explained(report: Any, events: Sequence[Any]) -> Iterator[str]:
    ran = [(event.op, event.collective, event.axis, event.nbytes) for event in events]
    planned = [(op.op, c.collective, c.axis, c.nbytes) for op in report.operators for c in op.collectives]
    if planned != ran:
        yield f"explain says {planned}, trace {ran}"
    if any(event.op == "?" for event in events):
        yield f"no operator: {ran}"
    for op in report.operators:
        nbytes = sum(c.nbytes for c in op.collectives)
        completed = op.rule and op.chosen in op.candidates and "P(" in op.chosen.placements.rpartition("->")[2]
        if op.chosen.bytes_moved < nbytes or (op.chosen.bytes_moved > nbytes and not completed):
            yield f"{op.op}: the chosen candidate moves {op.chosen.bytes_moved} B, its collectives {nbytes}: {op.chosen}"
        if len(op.collectives) > len(op.chosen.steps) or op.chosen not in op.candidates:
            yield f"{op.op}: {op.chosen.steps} for {op.collectives}"


def _refused(call: Callable[..., Any], events: Sequence[Any]) -> Iterator[str]:
    def run(f: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        with trace() as sent, strict():
            try:
                f(*args, **kwargs)
            except LayoutError as error:
                if REFUSED not in str(error):
                    raise
                return f"refused after {len([e for e in sent.events if not e.asked])}"
        return "ran"

    implicit = [(event.op, event.collective) for event in events if not event.asked]
    found = call(run)
    if found != ("refused after 0" if implicit else "ran"):
        yield f"strict: {found}, though trace shows {implicit} unasked"


def laid(sample: tuple[Any, ...], layouts: Sequence[Layout]) -> Make:
    args, kwargs = (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(layouts)
        return replace_leaves(
            (args, kwargs), lambda leaf: distribute(leaf, next(rest)) if isinstance(leaf, Tensor) else leaf
        )

    return make


def tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    replace_leaves(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_explained_traced_and_refused_alike(name: str) -> None:
    x = torch.rand(SHAPE)
    with simulated(MESH):
        wrong = {str(layout): disagreements(PROGRAMS[name], laid((x,), [layout])) for layout in LAYOUTS}

    assert not {layout: found for layout, found in wrong.items() if found}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted({name.partition(":")[0] for name in SAMPLES}))
def test_every_operator_is_explained_traced_and_refused_alike(family: str) -> None:
    draw, wrong = Random(0), []
    for mesh in (Mesh((3,)), Mesh((2, 2))):
        with simulated(mesh):
            for name, (function, sample) in SAMPLES.items():
                if name.partition(":")[0] != family:
                    continue
                for _ in range(10 if THOROUGH else 2):
                    layouts = [draw.choice(layouts_of(x, mesh)) for x in tensors(sample)]
                    found = disagreements(function, laid(sample, layouts))
                    wrong += [f"{name} [{'], ['.join(map(str, layouts))}]: {each}" for each in found]

    assert not wrong
