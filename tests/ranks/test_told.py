"""explain, trace and strict tell one story: what is explained runs, and strict refuses what nobody asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from helpers.operator_samples import SAMPLES
from helpers.pipeline_models import LOSS, Where, errors, staged
from helpers.told_programs import LAYOUTS, MESH, PROGRAMS, SHAPE
from hypothesis import settings
from torch import Tensor

from dshard import (
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    explain,
    strict,
    trace,
    use_topology,
)
from dshard.comm import bind, init_device_mesh
from dshard.core.moves import leaves, replace_leaves
from dshard.explain import Explanation
from dshard.pipeline import Pipeline
from dshard.testing import RankPool, distribute, simulated
from dshard.testing.choices import layouts_of
from dshard.topology import BYTES

THOROUGH = settings().max_examples > 100
Make = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
Sent = tuple[str, str, str, int]
"""Operator, collective, mesh axes, bytes."""
pytestmark = [pytest.mark.filterwarnings("ignore"), *([pytest.mark.thorough] if THOROUGH else [])]


class Story(NamedTuple):
    """What trace records of a call, of that what nobody asked for, what explain says of it, and what strict does."""

    sent: list[Sent]
    implicit: list[Sent]
    planned: list[Sent]
    operators: tuple[Explanation, ...]
    strictly: str

    def disagreements(self) -> Iterator[str]:
        """Where they tell different stories."""
        if self.sent != self.planned:
            yield f"explain says {self.planned}, trace {self.sent}"
        if any(op == "?" for op, *_ in self.sent):
            yield f"no operator: {self.sent}"
        if self.strictly != ("refused before any of it" if self.implicit else "ran"):
            yield f"strict: {self.strictly}, though nobody asked for {self.implicit}"
        for found in self.operators:
            if not _adds_up(found):
                yield f"{found.op} runs {found.collectives}, but {found.chosen} was chosen"


def _adds_up(found: Explanation) -> bool:
    """Whether the chosen candidate has the bytes of what runs; more only where it completes what is left pending."""
    nbytes = sum(sent.nbytes for sent in found.collectives)
    pending = bool(found.rule) and "P(" in found.chosen.placements.rpartition("->")[2]
    fits = nbytes <= found.chosen.bytes_moved if pending else nbytes == found.chosen.bytes_moved
    return fits and found.chosen in found.candidates and len(found.collectives) <= len(found.chosen.steps)


def story(function: Callable[..., Any], make: Make) -> Story:
    """A call traced, explained and made strictly; `make` gives its arguments anew each time."""

    def call(run: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        args, kwargs = make()
        return run(function, *args, **kwargs)

    with trace() as t:
        call(lambda f, *args, **kwargs: f(*args, **kwargs))
    operators = call(explain).operators
    sent = [(e.op, e.collective, e.axis, e.nbytes) for e in t.events]
    implicit = [one for one, event in zip(sent, t.events, strict=True) if not event.asked]
    planned = [(found.op, c.collective, c.axis, c.nbytes) for found in operators for c in found.collectives]
    return Story(sent, implicit, planned, operators, call(_strictly))


def _strictly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with trace() as t, strict():
        try:
            function(*args, **kwargs)
        except LayoutError as error:
            if "which strict() forbids" not in str(error):
                raise
            return "refused before any of it" if all(event.asked for event in t.events) else "refused too late"
    return "ran"


def laid(sample: tuple[Any, ...], layouts: Sequence[Layout]) -> Make:
    """The arguments of a sample, its tensors laid out."""
    given = (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})

    def make() -> Any:
        rest = iter(layouts)
        return replace_leaves(given, lambda leaf: distribute(leaf, next(rest)) if isinstance(leaf, Tensor) else leaf)

    return make


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_explained_traced_and_refused_alike(name: str) -> None:
    at = list(PROGRAMS).index(name)
    with simulated(MESH):
        for layout in LAYOUTS if THOROUGH else (LAYOUTS * 2)[at % len(LAYOUTS) :][:2]:
            told = story(PROGRAMS[name], laid((torch.rand(SHAPE),), [layout]))

            assert not list(told.disagreements()), layout


@pytest.mark.parametrize("family", sorted({name.partition(":")[0] for name in SAMPLES}))
def test_every_operator_is_explained_traced_and_refused_alike(family: str) -> None:
    draw, wrong = Random(0), []
    names = [name for name in SAMPLES if name.startswith(family)]
    for i, mesh in enumerate((Mesh((3,)), Mesh((2, 2)))):
        with simulated(mesh):
            for name in names if THOROUGH else names[i::2]:
                function, sample = SAMPLES[name]
                for _ in range(10 if THOROUGH else 1):
                    tensors = [leaf for leaf in leaves(list(sample)) if isinstance(leaf, Tensor)]
                    make = laid(sample, [draw.choice(layouts_of(x, mesh)) for x in tensors])
                    wrong += [f"{name}, {make()}: {each}" for each in story(function, make).disagreements()]

    assert not wrong


class TestAlternatives:
    """Operators that run in place of their rule."""

    @pytest.mark.parametrize(
        ("function", "name", "kinds"),
        [
            (lambda x: x[1:], "index exchange", ["all_to_all"]),
            (lambda x: torch.cat([x, x]), "index exchange", ["all_to_all"]),
            (lambda x: x.softmax(0), "small reductions", ["all_reduce", "all_reduce"]),
            (lambda x: x.cumsum(0), "summaries of blocks", ["all_gather"]),
            (lambda x: x.sort(0), "split moved to another dim", ["all_to_all"]),
        ],
    )
    def test_they_are_candidates_beside_those_of_the_rule(
        self, function: Callable[[Tensor], Tensor], name: str, kinds: list[str]
    ) -> None:
        mesh = Mesh((4,), ("x",))
        x = distribute_tensor(torch.empty(64, 4096, device="meta"), mesh, [Shard(0)])
        with use_topology(BYTES):
            (found,) = explain(function, x).operators

        assert (found.chosen.name, [sent.collective for sent in found.collectives]) == (name, kinds)
        assert len(found.candidates) > 1
        assert found.rule
        assert found.why.startswith("in place of the rule, whose cheapest candidate, ")
        assert f"*  {name}" in str(found)

    def test_an_operator_that_needs_a_layout_is_not_said_to_have_no_rule(self) -> None:
        with simulated(MESH):
            x = distribute(torch.rand(SHAPE), Layout(MESH, (Partial(), Shard(1))))
            found = explain(lambda: x.relu()).operators[0]

        assert found.why == "the operator needs it so"

    def test_strict_names_what_would_be_sent(self) -> None:
        with simulated(MESH), strict():
            x = distribute(torch.rand(SHAPE), Layout(MESH, (Shard(0), Shard(1))))
            with pytest.raises(
                LayoutError,
                match=r"^aten.roll.default at .*test_told.py:\d+ would send all_to_all over dp, which strict",
            ):
                x.roll(1, 0)


def test_local_work_is_not_refused() -> None:
    with simulated(MESH), trace() as t, strict():
        x = distribute(torch.rand(SHAPE), Layout(MESH, (Shard(0), Replicate())))
        y = distribute(torch.rand(SHAPE), Layout(MESH, (Replicate(), Replicate())))

        assert (x + y).placements == (Shard(0), Replicate())
    assert not t.events


def test_norms_of_tensors_on_several_meshes_are_traced() -> None:
    with simulated(4), trace() as t, strict():
        meshes = Mesh((2,), ("a",)), Mesh((2,), ("b",), ranks=(2, 3))
        torch._foreach_norm([distribute(torch.ones(4), Layout(mesh, (Shard(0),))) for mesh in meshes])

    assert [(event.op, event.axis) for event in t.events] == [("aten._foreach_norm.Scalar", name) for name in "ab"]


def on_a_rank(names: Sequence[str]) -> dict[str, Story]:
    """The story of each program on one of its layouts, as this rank tells it."""
    mesh, found = bind(init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)), {}
    warnings.simplefilter("ignore")
    for i, name in enumerate(names):
        layout = Layout(mesh, LAYOUTS[i % len(LAYOUTS)].placements)
        found[name] = story(PROGRAMS[name], laid((torch.full(SHAPE, 0.5),), [layout]))._replace(operators=())
    return found


@pytest.mark.ranks
def test_ranks_tell_it_too(ranks: RankPool) -> None:
    names = [name for name in PROGRAMS if name != "to another mesh"]
    every = ranks.run(on_a_rank, names if THOROUGH else names[::4], timeout=600.0)

    for name, first in every[0].items():
        sent = [each[name].sent for each in every]
        busiest = [(*one[0][:3], max(nbytes for *_, nbytes in one)) for one in zip(*sent, strict=True)]
        assert not list(first._replace(sent=busiest).disagreements()), name
        assert {each[name].strictly for each in every} == {first.strictly}, name


def pipeline_on_a_rank() -> list[tuple[str, bool]]:
    """The operators of what is sent in two steps of a pipeline, and whether they were asked for."""
    stages = staged("u", (Where((0, 1), (2,), "data"), Where((2, 3), (2,), "tensor")))
    pipeline = Pipeline(stages, n_microbatches=2, loss=LOSS["u"])
    with trace() as t:
        errors(pipeline, "u")
        errors(pipeline, "u")
    return [(event.op, event.asked) for event in t.events if event.collective.startswith("reshard") or event.op == "?"]


@pytest.mark.ranks
def test_what_stages_send_each_other_is_asked_for(ranks: RankPool) -> None:
    for sent in ranks.run(pipeline_on_a_rank):
        assert set(sent) == {("pipeline", True)}
