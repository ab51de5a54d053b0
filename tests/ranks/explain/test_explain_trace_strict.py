"""explain, trace and strict agree: explained collectives run, and strict refuses the implicit ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from helpers.default_cases import one_in
from helpers.explained_programs import LAYOUTS, MESH, PROGRAMS, SHAPE
from helpers.operator_samples import ELSEWHERE, SAMPLES
from helpers.pipeline_models import LOSS, Where, errors, staged
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
from dshard.core.trees import leaves, replace_leaves
from dshard.dispatch.registry import TABLES
from dshard.explain import Explanation
from dshard.pipeline import Pipeline
from dshard.testing import RankPool, distribute, simulated
from dshard.testing.rule_rows import layouts_of
from dshard.topology import BYTES, Topology

THOROUGH = settings().max_examples > 100
Make = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
Sent = tuple[str, str, str, int]
"""Operator, collective, mesh axes, bytes."""
pytestmark = [pytest.mark.filterwarnings("ignore"), *([pytest.mark.thorough] if THOROUGH else [])]


class Reports(NamedTuple):
    """Collectives of a call that trace records, the implicit ones, those that explain plans; and strict's outcome."""

    sent: list[Sent]
    implicit: list[Sent]
    planned: list[Sent]
    operators: tuple[Explanation, ...]
    strictly: str

    def disagreements(self) -> Iterator[str]:
        """Yield the differences between the three reports."""
        if self.sent != self.planned:
            yield f"explain says {self.planned}, trace {self.sent}"
        if any(op == "?" for op, *_ in self.sent):
            yield f"no operator: {self.sent}"
        if self.strictly != ("refused before any of it" if self.implicit else "ran"):
            yield f"strict: {self.strictly}, though nobody asked for {self.implicit}"
        for explanation in self.operators:
            if not _adds_up(explanation):
                yield f"{explanation.op} runs {explanation.collectives}, but {explanation.chosen} was chosen"


def _adds_up(explanation: Explanation) -> bool:
    """Whether the chosen candidate has the bytes of the collectives that run; more only if it leaves a partial."""
    nbytes = sum(sent.nbytes for sent in explanation.collectives)
    has_partial = bool(explanation.rule) and "P(" in explanation.chosen.placements.rpartition("->")[2]
    fits = nbytes <= explanation.chosen.bytes_moved if has_partial else nbytes == explanation.chosen.bytes_moved
    return (
        fits
        and explanation.chosen in explanation.candidates
        and len(explanation.collectives) <= len(explanation.chosen.steps)
    )


def reports_of(function: Callable[..., Any], make: Make) -> Reports:
    """Trace and explain a call, and make it under strict; `make` gives its arguments anew each time."""

    def call(run: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        args, kwargs = make()
        return run(function, *args, **kwargs)

    with trace() as t:
        call(lambda f, *args, **kwargs: f(*args, **kwargs))
    operators = call(explain).operators
    sent = [(e.op, e.collective, e.axis, e.nbytes) for e in t.events]
    implicit = [one for one, event in zip(sent, t.events, strict=True) if not event.asked]
    planned = [
        (explanation.op, c.collective, c.axis, c.nbytes) for explanation in operators for c in explanation.collectives
    ]
    return Reports(sent, implicit, planned, operators, call(_strictly))


def _strictly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with trace() as t, strict():
        try:
            function(*args, **kwargs)
        except LayoutError as error:
            if "which strict() forbids" not in str(error):
                raise
            return "refused before any of it" if all(event.asked for event in t.events) else "refused too late"
    return "ran"


def arguments_in(sample: tuple[Any, ...], layouts: Sequence[Layout]) -> Make:
    """Return a function that makes the arguments of a sample, with its tensors in these layouts."""
    arguments = (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})

    def make() -> Any:
        rest = iter(layouts)
        return replace_leaves(
            arguments, lambda leaf: distribute(leaf, next(rest)) if isinstance(leaf, Tensor) else leaf
        )

    return make


@pytest.mark.parametrize("name", one_in(2, PROGRAMS))
def test_a_program_is_explained_traced_and_refused_alike(name: str) -> None:
    at = list(PROGRAMS).index(name)
    with simulated(MESH):
        for layout in LAYOUTS if THOROUGH else LAYOUTS[at % len(LAYOUTS) :][:1]:
            reports = reports_of(PROGRAMS[name], arguments_in((torch.rand(SHAPE),), [layout]))

            assert not list(reports.disagreements()), layout


@pytest.mark.parametrize("family", sorted({name.partition(":")[0] for name in SAMPLES}))
def test_every_operator_is_explained_traced_and_refused_alike(family: str) -> None:
    draw, wrong = Random(0), []
    names = [name for name in SAMPLES if name.startswith(family)]
    for i, mesh in enumerate((Mesh((3,)), Mesh((2, 2)))):
        with simulated(mesh):
            for name in names if THOROUGH else names[i::4]:
                function, sample = SAMPLES[name]
                for _ in range(10 if THOROUGH else 1):
                    tensors = [leaf for leaf in leaves(list(sample)) if isinstance(leaf, Tensor)]
                    make = arguments_in(sample, [draw.choice(layouts_of(x, mesh)) for x in tensors])
                    wrong += [f"{name}, {make()}: {each}" for each in reports_of(function, make).disagreements()]

    assert not wrong


def along_split_dims() -> list[tuple[Callable[[Tensor], Any], Tensor]]:
    """Calls of all operators that have alternatives, and an operand of each."""
    x, aten, row = torch.rand(8, 64), torch.ops.aten, torch.rand(64)
    statistics = torch.rand(8, 1), torch.rand(8, 1)
    calls: list[Callable[[Tensor], Any]] = [
        *(lambda x, f=f: f(x, -1, False) for f in (aten._softmax, aten._log_softmax)),
        *(lambda x, f=f: f(x, x, 1, x.dtype) for f in (aten._softmax_backward_data, aten._log_softmax_backward_data)),
        lambda x: aten.native_layer_norm(x, [64], None, None, 1e-5),
        lambda x: aten.native_layer_norm_backward(
            x, x, [64], *(on_mesh(x, s) for s in statistics), on_mesh(x, row), on_mesh(x, row), [True, True, True]
        ),
        *(
            lambda x, f=f: f(x, 1)
            for f in (
                *(torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin, torch.argmax),
                *(torch.argmin, torch.max, torch.min, torch.sort, torch.median, torch.nanmedian, torch.mode),
            )
        ),
        lambda x: x.kthvalue(3, 1),
        lambda x: x.topk(3, 1),
        lambda x: x[:, 3:40],
        lambda x: aten.slice_backward(x, [8, 80], 1, 2, 66, 1),
        lambda x: torch.slice_scatter(x, x[:, 1:33] + 0, 1, 4, 36),
        lambda x: x.split(16, 1),
        lambda x: x.split([20, 44], 1),
        lambda x: torch.cat([x, x], 1),
        lambda x: x.flip(1),
        lambda x: x.roll(3, 1),
        lambda x: x.repeat(2, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2)),
        lambda x: aten._cdist_forward(x.float(), x.float(), 2.0, None),
    ]
    return [(call, x) for call in calls]


def on_mesh(like: Any, values: Tensor) -> Any:
    """Replicated values in the dtype of `like`."""
    return distribute_tensor(values.to(like.dtype), like.device_mesh, src_data_rank=None)


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
            (explanation,) = explain(function, x).operators

        assert (explanation.chosen.name, [sent.collective for sent in explanation.collectives]) == (name, kinds)
        assert len(explanation.candidates) > 1
        assert explanation.rule
        assert explanation.why.startswith("in place of the rule, whose cheapest candidate, ")
        assert f"*  {name}" in str(explanation)

    def test_tensors_are_concatenated_in_the_cheapest_of_their_layouts(self) -> None:
        mesh, along_x, along_y = Mesh((2, 2), ("x", "y")), [Shard(0), Shard(1)], [Shard(1), Shard(0)]
        layouts = {100: along_x, 80: along_y, 81: along_y}  # the largest is less than the others together
        tensors = [distribute_tensor(torch.empty(n, 64, device="meta"), mesh, p) for n, p in layouts.items()]

        (explanation,) = explain(torch.cat, tensors).operators

        assert [each.name for each in explanation.candidates].count("index exchange") == 2
        assert explanation.chosen.name == "index exchange"
        assert explanation.chosen.placements.endswith("-> x:S(1) y:S(0)")
        assert [sent.collective for sent in explanation.collectives] == ["all_to_all", "all_to_all"]

    @pytest.mark.parametrize("topology", [None, BYTES], ids=["latency counts", "bytes count"])
    def test_each_is_listed_with_its_price_and_the_cheapest_candidate_runs(self, topology: Topology | None) -> None:
        rows = {name: row for table in TABLES for name, row in table.items() if row.alternatives}
        rows = {name: row for name, row in rows.items() if name not in ELSEWHERE}  # GPUs alone have their kernels
        listed: set[tuple[str, str]] = set()
        mesh = Mesh((4,), ("x",))
        with simulated(mesh), nullcontext() if topology is None else use_topology(topology):
            for function, values in along_split_dims():
                for dim in range(values.dim()):
                    x = distribute(values, Layout(mesh, (Shard(dim),)))
                    for explanation in explain(function, x).operators:
                        name = explanation.op.replace("aten.", "aten::").partition(".")[0]
                        others = {other.name for other in rows[name].alternatives} if name in rows else set()
                        shown = {each.name for each in explanation.candidates} & others
                        listed |= {(name, each) for each in shown}
                        assert not shown or explanation.chosen.seconds == min(
                            each.seconds for each in explanation.candidates
                        )

        every = {(name, other.name) for name, row in rows.items() for other in row.alternatives}
        missing = ", ".join(f"{name} ({other})" for name, other in sorted(every - listed))
        assert not missing, f"no call of along_split_dims() shows these alternatives: {missing}; add one for each"

    @pytest.mark.parametrize(
        "dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16], ids=str
    )
    def test_what_they_plan_runs_in_half_precision_and_gives_the_layouts_that_it_says(self, dtype: torch.dtype) -> None:
        for mesh, placements in (
            (Mesh((4,)), (Shard(1),)),
            (MESH, (Shard(0), Shard(1))),
            (MESH, (Partial(), Shard(1))),
        ):
            layout = Layout(mesh, placements)
            with simulated(mesh), use_topology(BYTES):
                for function, values in along_split_dims():
                    arguments = arguments_in((values.to(dtype),), [layout])
                    reports = reports_of(function, arguments)
                    chosen = [op.chosen for op in reports.operators]

                    assert not list(reports.disagreements()), (layout, reports.operators)
                    if len(chosen) == 1 and reports.operators[0].why.startswith("in place of the rule"):
                        outputs = [x._spec.layout for x in leaves(function(*arguments()[0])) if isinstance(x, Tensor)]
                        assert chosen[0].placements.rpartition(" -> ")[2] == ", ".join(map(str, outputs))

    def test_an_operator_that_needs_a_layout_is_not_said_to_have_no_rule(self) -> None:
        with simulated(MESH):
            x = distribute(torch.rand(SHAPE), Layout(MESH, (Partial(), Shard(1))))
            explanation = explain(lambda: x.relu()).operators[0]

        assert explanation.why == "the operator needs it so"

    def test_strict_names_what_would_be_sent(self) -> None:
        with simulated(MESH), strict():
            x = distribute(torch.rand(SHAPE), Layout(MESH, (Shard(0), Shard(1))))
            with pytest.raises(
                LayoutError,
                match=r"^aten.roll.default at .*test_explain_trace_strict.py:\d+ would send all_to_all over dp, which",
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


def on_a_rank(names: Sequence[str]) -> dict[str, Reports]:
    """Return this rank's reports of each program, on one of its layouts."""
    mesh, reports = bind(init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)), {}
    warnings.simplefilter("ignore")
    for i, name in enumerate(names):
        layout = Layout(mesh, LAYOUTS[i % len(LAYOUTS)].placements)
        reports[name] = reports_of(PROGRAMS[name], arguments_in((torch.full(SHAPE, 0.5),), [layout]))._replace(
            operators=()
        )
    return reports


@pytest.mark.ranks
def test_reports_agree_on_real_ranks(ranks: RankPool) -> None:
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
