"""What a notebook shows of a value: a picture or its table; and at a prompt a line, or the table."""

from __future__ import annotations

from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from dshard import Layout, Mesh, Replicate, Shard, Topology, distribute_tensor, explain, plan_model, trace
from dshard.compare import Comparison, Deviation, ModuleComparison
from dshard.parallel import plan_table
from dshard.pipeline import StageCost, chain, rank_schedules, uniform
from dshard.redistribute import plan
from dshard.reshard import plan_reshard
from dshard.selftest import Result, SelfTest, environment

MESH = Mesh((2, 4), ("dp", "tp"))
THERE = Mesh((4,), ("tp",), ranks=(8, 9, 10, 11))
ROWS = Layout(MESH, (Shard(0), Replicate()))


def comparison() -> Comparison:
    wrong = Deviation("fc", 0, "output", "", 0.5, 0.01)
    right = Deviation("", 0, "output", "", 1e-7, 1e-6)
    rows = (ModuleComparison("", "Net", 1, (right,)), ModuleComparison("fc", "Linear", 2, (wrong,)))
    return Comparison("Net", "data", rows, wrong)


@cache
def values() -> dict[str, Any]:
    x = distribute_tensor(torch.empty(6, 8, device="meta"), MESH, ROWS.placements)
    w = distribute_tensor(torch.empty(8, 8, device="meta"), MESH, [Replicate(), Shard(1)])
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    choice = rank_schedules(uniform(2, chain(2), StageCost(1.0, 2.0)), 4, chain(2))[0]
    topology = Topology.preset("dgx-a100", nodes=2)
    with trace() as traced:
        x.redistribute(placements=[Replicate(), Replicate()])
    return {
        "layout": ROWS,
        "tensor": x,
        "plan": plan_model(model, MESH, "data x megatron", torch.ones(4, 8)),
        "redistribution": plan(ROWS, Layout(MESH, (Replicate(), Shard(1))), (6, 8), 4, topology),
        "resharding": plan_reshard(ROWS, Layout(THERE, (Shard(1),)), (6, 8), 4, topology),
        "report": explain(torch.matmul, x, w),
        "explanation": explain(torch.matmul, x, w).operators[0],
        "trace": traced,
        "comparison": comparison(),
        "topology": topology,
        "choice": choice,
        "timeline": choice.timeline,
        "plans": plan_table(model, 4, topology, (torch.ones(4, 8),), {}),
        "self-test": SelfTest((Result("gloo", "products", True, 1.0, "summa, cannon"),), environment("cpu")),
    }


SAYS = {
    "layout": "dp:S(0) tp:R of 2x1 on dp=2 tp=4",
    "tensor": "dp:S(0) tp:R of 6x8 on dp=2 tp=4",
    "plan": "a rank holds at most",
    "redistribution": "dp:R tp:S(1)",
    "resharding": "of the lower bound",
    "report": "the cheapest of",
    "explanation": "the cheapest of",
    "trace": "all_gather",
    "comparison": "differs first in fc",
    "topology": "group GB/s",
    "choice": "2 stages, 4 microbatches",
    "timeline": "in flight",
    "plans": "MFU",
    "self-test": "1 of 1 passed",
}


@pytest.mark.parametrize("name", SAYS)
def test_a_notebook_draws_it(name: str) -> None:
    html = values()[name]._repr_html_()

    text = "".join(ElementTree.fromstring(html).itertext())  # it is well-formed
    assert SAYS[name] in text


@pytest.mark.parametrize("name", SAYS)
def test_its_text_is_a_line_or_its_table(name: str) -> None:
    value = values()[name]

    assert len(repr(value)) <= 200 or (repr(value) == str(value) and "\n" in repr(value))


def test_the_text_of_a_large_tensor_says_the_shape_of_its_part() -> None:
    x = distribute_tensor(torch.empty(64, 64, device="meta"), MESH, ROWS.placements)
    x._local_tensor = torch.zeros(32, 64)

    assert repr(x).endswith("local of shape (32, 64))")


def test_pictures_of_large_meshes_are_left_out() -> None:
    large = Layout(Mesh((64, 64)), (Shard(0), Shard(1)))

    assert large._repr_html_().startswith("<pre")
