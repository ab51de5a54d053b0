"""What explain says of expressions, exports and on real ranks."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.explain_cases import MESH, mesh, row_parallel

from dshard import (
    DShardError,
    Layout,
    LayoutError,
    Mesh,
    NotationError,
    Partial,
    Replicate,
    Shard,
    cache_info,
    distribute_tensor,
    explain,
    trace,
)
from dshard.caches import clear_caches
from dshard.explain import describe_tensor, explain_source
from dshard.report import export
from dshard.rules.communication_bounds import matmul_lower_bound
from dshard.testing import distribute, simulated


class TestSource:
    MESH = Mesh((2, 4))

    def tensors(self, *texts: str):
        return dict(describe_tensor(text, self.MESH, torch.float32) for text in texts)

    def test_an_expression_explains_each_operator(self):
        report = explain_source("F.gelu(x @ w)", self.tensors("x: 64x32 S(0) R", "w: 32x16 R S(1)"))

        assert [operator.op for operator in report.operators] == ["matmul", "aten.gelu.default"]
        assert report.chosen.name == "d0:m d1:n"

    def test_a_described_tensor_may_be_partial_ordered_and_of_a_dtype(self):
        x = self.tensors("x: 64x32 P(sum) S(1)")["x"]
        ids = self.tensors("ids: 64 int64 d0:S(0) d1:S(0); 0:d1,d0")["ids"]

        assert (x.placements, x.dtype) == ((Partial("sum"), Shard(1)), torch.float32)
        assert (str(ids.layout), ids.dtype, ids.to_local().shape) == ("d0:S(0) d1:S(0); 0:d1,d0", torch.int64, (8,))

    def test_a_function_gets_the_tensors_it_names(self, tmp_path):
        (tmp_path / "neighbour_of_step.py").write_text("scale = 2.0\n")
        file = tmp_path / "steps.py"
        file.write_text(
            "from neighbour_of_step import scale\n\ndef step(x, w, bias=None):\n    y = x @ w\n    return y * scale\n"
        )

        report = explain_source(f"{file}:step", self.tensors("x: 64x32 S(0) R", "w: 32x16 R S(1)", "other: 4 R R"))

        assert [(operator.op, operator.line) for operator in report.operators] == [
            ("matmul", f"{file}:4"),
            ("aten.mul.Tensor", f"{file}:5"),
        ]

    @pytest.mark.parametrize(
        ("source", "error", "message"),
        [
            ("x @ v", NotationError, r"'x @ v': name 'v' is not defined; there are torch, F, x$"),
            ("x @", NotationError, r"'x @' is no expression \(invalid syntax\): write one such as 'x @ w'"),
            ("x @ x", DShardError, r"x @ x: RuntimeError: .*64"),
            ("absent.py:step", NotationError, "there is no file 'absent.py'"),
            ("no.such.module:step", NotationError, "cannot import 'no.such.module': .*No module named 'no'"),
            ("json:lodas", NotationError, "json has no function 'lodas'; it has .*loads"),
            ("textwrap:dedent", NotationError, "textwrap:dedent needs text: describe each tensor, as in 'text: 4096x"),
        ],
    )
    def test_what_cannot_be_read_says_why(self, source, error, message):
        with pytest.raises(error, match=message):
            explain_source(source, self.tensors("x: 64x32 S(0) R"))

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("x 64x32 S(0) R", NotationError, "describes no tensor: write its name, sizes and placements"),
            ("x: 64x32", NotationError, "describes no tensor"),
            ("x: 64x32 S(0)", LayoutError, "1 placements .* give 2, one for each mesh axis"),
            ("x: 64x32 S(2) R", LayoutError, r"S\(2\) is out of range for shape \(64, 32\)"),
            ("x: 64x32 S(0) Q", NotationError, "'Q' is no placement"),
            ("x: 64x32 int65 S(0) R", NotationError, "'int65' is no dtype: use one of bf16, fp16"),
        ],
    )
    def test_what_describes_no_tensor_says_why(self, text, error, message):
        with pytest.raises(error, match=message):
            self.tensors(text)


class TestExport:
    @pytest.mark.parametrize("form", ["html", "svg", "txt"])
    def test_what_is_written_has_the_table(self, form, tmp_path):
        found = explain(F.linear, *row_parallel())

        export(found, tmp_path / f"report.{form}")

        text = (tmp_path / f"report.{form}").read_text().replace("&#160;", " ")
        assert "dp:_0 tp:k" in text
        assert "the cheapest of 17" in text
        assert {"html": "<!DOCTYPE html>", "svg": "<svg", "txt": "linear "}[form] in text[:200]

    def test_json_is_for_machines(self, tmp_path):
        found = explain(F.linear, *row_parallel())

        export(found, tmp_path / "report.json")

        assert json.loads((tmp_path / "report.json").read_text())[0]["chosen"]["name"] == "dp:_0 tp:k"

    def test_a_trace_is_exported_as_text(self, tmp_path):
        with simulated(MESH), trace() as t:
            x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Shard(1))))
            x.redistribute(placements=[Replicate(), Shard(1)])

        export(t, tmp_path / "trace.txt")

        text = (tmp_path / "trace.txt").read_text()
        assert text.startswith("1 collective, 96 B received")
        assert "all_gather" in text

    @pytest.mark.parametrize(("value", "name"), [("a table", "x.json"), ("a table", "x.pdf"), ("a table", "x")])
    def test_other_forms_are_refused(self, value, name, tmp_path):
        with pytest.raises(NotationError, match=r"use a name that ends in .html, .svg, .txt or .json"):
            export(value, tmp_path / name)


@pytest.mark.parametrize(
    ("m", "k", "n", "p", "mebi"),
    # from the bound's three cases for an MLP's first product: 1-D, 2-D and 3-D
    [
        (65536, 4096, 16384, 4, 48.0),
        (65536, 4096, 16384, 16, 44.0),
        (65536, 4096, 16384, 64, 27.0),
        (4096, 4096, 16384, 8, 12.24),
    ],
)
def test_the_lower_bound_of_a_product(m, k, n, p, mebi):
    assert matmul_lower_bound(m, k, n, p) / 2**20 == pytest.approx(mebi, abs=0.005)


def test_what_was_decided_is_remembered():
    with simulated(MESH):
        x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Shard(1))))
        x.tanh()
        before = cache_info()["executors"].entries
        x.tanh()

    assert cache_info()["executors"].entries == before > 0


def diverge() -> str:
    """Rank 1 asks for another layout than the others."""
    os.environ["DSHARD_DEBUG"] = "1"
    try:
        x = distribute_tensor(torch.ones(4, 8), mesh(), [Shard(0)], src_data_rank=None)
        x.redistribute(placements=[Shard(1) if dist.get_rank() == 1 else Replicate()])
    except Exception as error:
        return str(error)
    finally:
        del os.environ["DSHARD_DEBUG"]
    return ""


def explained_on_hosts(environment: dict[str, str]) -> list[str]:
    """The topology by default, on hosts as torchrun would tell."""
    os.environ.update(environment)
    clear_caches()
    try:
        x = distribute_tensor(torch.ones(4, 8), mesh(), [Shard(0)], src_data_rank=None)
        (found,) = explain(torch.sigmoid, x).operators
        pure = distribute_tensor(torch.empty(8, 8, device="meta"), MESH, [Shard(0), Replicate()])
        (planned,) = explain(torch.sigmoid, pure).operators
        return [found.topology, found.topology_why, planned.topology]
    finally:
        for name in environment:
            del os.environ[name]
        clear_caches()


FLAT = ["flat-cpu", "the default for cpu ranks", "flat-cpu"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"LOCAL_WORLD_SIZE": "2"},
            ["2-cpu-hosts", "the default for cpu ranks with 2 ranks on each host (LOCAL_WORLD_SIZE)", "flat-cpu"],
        ),
        ({"LOCAL_WORLD_SIZE": "4"}, FLAT),  # one host
        ({"LOCAL_WORLD_SIZE": "3"}, FLAT),  # the other has one rank
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}, FLAT),  # two others have one rank
        ({}, FLAT),
    ],
)
def test_the_default_topology_has_the_hosts_that_torchrun_tells(ranks, environment, told):
    assert ranks.run(explained_on_hosts, environment) == [told] * 4


@pytest.mark.ranks
def test_in_debug_mode_ranks_that_diverge_are_told_so(ranks):
    told = ranks.run(diverge)

    assert len(set(told)) == 1
    assert "their programs have diverged: ranks [0, 2, 3] run" in told[0]
    assert "ranks [1] run" in told[0]
