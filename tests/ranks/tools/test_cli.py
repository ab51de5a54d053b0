"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dshard import __version__
from dshard.errors import RankError
from dshard.tools import demo, report
from dshard.tools.cli import main
from dshard.tools.demo import Row, Settings

ROWS = [
    Row("single", "1 device", 0.072, 0.0, 0.975, 0, 0, 3.6),
    Row("data x tensor", "dp=2 tp=2", 0.0720001, 2.4e-07, 0.975, 1041, 2_202_009, 116.04, (2.3, 0.0720001)),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that the demo was called with; it returns `ROWS` at once."""
    calls: list[Settings] = []

    def run(settings: Settings, tell: Any) -> list[Row]:
        calls.append(settings)
        return ROWS

    monkeypatch.setattr(demo, "run", run)
    return calls


def printed(value: Any) -> str:
    """What a user sees on a terminal of 80 columns without colours."""
    console = Console(file=StringIO(), width=80)
    console.print(value)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])

    assert "demo" in capsys.readouterr().out


def test_help_lists_the_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])

    assert "data-x-tensor" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])

    assert capsys.readouterr().out == f"dshard {__version__}, torch {torch.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--strategy", "zero"], "no strategy is called 'zero'; there are single, data, megatron"),
        (["demo", "--strategy", "2.5d"], "there are single, data, megatron, data x tensor, summa, atp, tesseract"),
        (["demo", "--steps", "0"], "'0' is not a whole number above zero"),
        (["demo", "--ranks", "-1"], "'-1' is not a whole number above zero"),
        (["demo", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)

    assert message in " ".join(capsys.readouterr().err.split())


def test_arguments_become_settings(asked: list[Settings]) -> None:
    options = "--ranks 2 --steps 7 --dtype float64 --seed 3 --device cpu --strategy data --strategy data-x-tensor"

    assert main(["demo", *options.split()]) == 0

    assert asked == [Settings(("data", "data x tensor"), ranks=2, steps=7, dtype=torch.float64, seed=3, device="cpu")]


@pytest.mark.parametrize("options", [[], ["--strategy", "all"], ["--strategy", "data", "--strategy", "all"]])
def test_all_strategies_unless_some_are_named(options: list[str], asked: list[Settings]) -> None:
    main(["demo", "--device", "cpu", *options])

    assert asked == [Settings()]


def test_auto_is_the_strategy_that_is_predicted_to_communicate_the_shortest(
    asked: list[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = [demo.Predicted("summa", 9, 9, 0.001), demo.Predicted("data", 1, 1, 0.002)]
    monkeypatch.setattr(demo, "rank", lambda *of: ranked if of == (3, demo.BATCH, "cpu", torch.float32) else [])

    main(["demo", "--ranks", "3", "--device", "cpu", "--strategy", "atp", "--strategy", "auto", "--json"])

    assert asked[0].strategies == ("atp", "summa")
    captured = capsys.readouterr()
    assert "auto: summa, predicted to communicate for 1.0 ms in a step (data 2.0 ms)" in captured.err
    assert json.loads(captured.out)["rows"]


def test_a_plot_is_written_on_request(asked: list[Settings], tmp_path: Path) -> None:
    main(["demo", "--plot", str(tmp_path / "losses.svg")])

    assert (tmp_path / "losses.svg").read_text() == demo.draw(ROWS)


def test_json_is_all_that_is_printed(asked: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]

    assert [list(row) for row in rows] == [[field.name for field in fields(Row)]] * 2
    assert rows[1]["max_loss_diff"] == 2.4e-07


def test_only_rank_0_prints(
    asked: list[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert main(["demo"]) == 0

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_failed_rank_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(settings: Settings, tell: Any) -> list[Row]:
        raise RankError("rank 2 failed: ValueError: [1, 2]\n\n  File ...")

    monkeypatch.setattr(demo, "run", run)

    assert main(["demo"]) == 1

    assert "error: rank 2 failed: ValueError: [1, 2]" in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: Settings, tell: Any) -> list[Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", run)

    assert main(["demo"]) == 130


def test_the_table_fits_a_terminal() -> None:
    text = printed(report.demo_table(ROWS, Settings()))

    assert "…" not in text
    assert "data x tensor  dp=2 tp=2  0.07200  2.4e-07  97.5%    1,041  2.1 MiB   116.0" in text


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("chosen", "meshes"),
    [
        pytest.param(["--strategy", "summa"], ["1 device", "r=2 c=2"], marks=pytest.mark.thorough),
        pytest.param([], ["1 device", "dp=4", "tp=4", "dp=2 tp=2", "r=2 c=2", "d1=2 d2=2"], marks=pytest.mark.thorough),
    ],
)
def test_the_demo_from_end_to_end(chosen: list[str], meshes: list[str]) -> None:
    command = [sys.executable, "-m", "dshard", "demo", "--json", "--steps", "2", "--device", "cpu", *chosen]

    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["mesh"] for row in rows] == meshes
    assert max(row["max_loss_diff"] for row in rows) < 1e-5


class TestPlan:
    REDISTRIBUTE = ("plan", "redistribute", "--mesh", "dp=2,tp=4", "--shape", "2048x2048")

    def test_redistribute_prints_each_step(self, capsys):
        status = main([*self.REDISTRIBUTE, "--from", "dp:P(sum) tp:R", "--to", "dp:S(0) tp:S(0)"])

        assert status == 0
        assert "reduce_exchange" in capsys.readouterr().out

    RESHARD = ("plan", "reshard", "--mesh", "2x4", "--to-mesh", "3x4", "--shape", "1024x1024x512", "--nodes", "5")

    def test_reshard_prints_who_sends_what_to_whom(self, capsys):
        status = main([*self.RESHARD, "--from", "S(0) R", "--to", "S(0) R", "--itemsize", "4"])

        shown = capsys.readouterr().out
        assert status == 0
        assert "0 > 8 > 9 > 10 > 11" in shown
        assert "host 1 -> host 4: 680 MiB" in shown
        assert "makespan 858993.5 us, 1.00 of the lower bound" in shown
        assert "naive broadcast: makespan 1717986.9 us" in shown

    def test_reshard_tells_machines_each_chain(self, capsys):
        main([*self.RESHARD, "--from", "P(sum) S(1)", "--to", "R R", "--to-first", "4", "--json"])

        found = json.loads(capsys.readouterr().out)

        assert found["src"] == "d0:P(sum) d1:S(1)"
        assert found["ratio"] >= 1.0
        assert {chain["ranks"][-1] for chain in found["chains"]} <= set(range(4, 16))
        assert found["baselines"] == {}
        assert sum(found["hosts"][i]["nbytes"] for i in range(len(found["hosts"]))) > 0

    def test_redistribute_tells_machines_the_bytes_of_each_step(self, capsys):
        main([*self.REDISTRIBUTE, "--from", "dp:R tp:S(0)", "--to", "dp:R tp:R", "--itemsize", "4", "--json"])

        found = json.loads(capsys.readouterr().out)

        assert [(step["step"], step["axes"]) for step in found["steps"]] == [("all_gather", "tp")]
        assert found["steps"][0]["nbytes"] == 2048 * 2048 * 4 * 3 // 4

    def test_a_layout_that_cannot_be_is_one_line(self, capsys):
        status = main([*self.REDISTRIBUTE, "--from", "dp:S(2) tp:R", "--to", "dp:R tp:R"])

        assert status == 1
        assert "S(2) is out of range" in capsys.readouterr().err

    def test_the_topology_is_named_and_how_it_came_to_be_used(self, capsys):
        main([*self.REDISTRIBUTE, "--from", "R S(0)", "--to", "R R"])
        by_default = capsys.readouterr().out
        main([*self.REDISTRIBUTE, "--from", "R S(0)", "--to", "R R", "--nodes", "2", "--json"])
        on_hosts = json.loads(capsys.readouterr().out)
        main([*self.REDISTRIBUTE, "--from", "R S(0)", "--to", "R R", "--topology", "dgx-h100", "--json"])
        given = json.loads(capsys.readouterr().out)

        device = "cuda" if torch.cuda.is_available() else "cpu"
        assert f"topology flat-{device}: n x rank (" in by_default
        assert f"; the default for {device} ranks; choose another with --topology" in by_default
        assert on_hosts["topology"] == f"4-{device}-hosts"
        assert f"{device} ranks with 4 on each of 2 hosts; " in on_hosts["topology_why"]
        assert given["network"] == "dgx-h100: 8 x gpu (450 GB/s)"
        assert given["topology_why"] == "as given"

    def test_an_unknown_machine_names_those_there_are(self, capsys):
        status = main([*self.REDISTRIBUTE, "--from", "R S(0)", "--to", "R R", "--topology", "abacus"])

        assert status == 1
        assert "dgx-h100" in capsys.readouterr().err


class TestPlanMatmul:
    SIZES = ("plan", "matmul", "--m", "4096", "--k", "512", "--n", "1024")

    def test_every_way_on_machines_that_are_not_here(self, capsys):
        assert main([*self.SIZES, "--mesh", "8x8x8", "--topology", "dgx-h100", "--top", "3"]) == 0

        text = capsys.readouterr().out
        lines = text.splitlines()
        assert lines[0] == "matmul   m k, k n -> m n"
        assert lines[1].endswith(
            "dgx-h100: 64 x node (400 GB/s), 8 x gpu (450 GB/s); as given; 64 nodes hold the 512 ranks"
        )
        assert lines[2] == "  operand A (4096, 512) bfloat16 on d0=8 d1=8 d2=8"
        assert sum(line.startswith("*") for line in lines) == 1
        assert "997 dearer candidates are not shown" in text
        assert "the cheapest of 1,000; " in text
        assert "of those that store each tensor once" in text

    def test_machines_read_all_figures(self, capsys):
        main([*self.SIZES, "--mesh", "x=4,y=2", "--topology", "dgx-h100", "--one-copy", "--json", "--dtype", "fp32"])

        found = json.loads(capsys.readouterr().out)

        assert found["considered"] == 36
        assert len(found["candidates"]) == 12
        assert found["chosen"] == found["candidates"][0]
        assert set(found["chosen"]) == {
            *("name", "placements", "bytes_moved", "messages", "peak_bytes", "steps", "one_copy", "bound_ratio"),
            *("gather_seconds", "compute_seconds", "reduce_seconds", "backward_seconds", "seconds"),
        }
        assert "float32" in found["operands"][0]

    def test_given_layouts_are_explained(self, capsys):
        main([*self.SIZES, "--mesh", "2x4", "--a", "S(0) R", "--b", "d0:R d1:S(1)"])

        text = capsys.readouterr().out

        assert "operand A [d0:S(0) d1:R] (4096, 512)" in text
        assert "chosen: d0:m d1:n, the cheapest of 17; " in text

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--mesh", "2x4", "--a", "S(0) R"], "only the layout of a is given: give both, or neither to search"),
            (["--mesh", "2x4", "--a", "S(0)", "--b", "R R"], "1 placements [S(0)] for the mesh (d0=2 d1=4): give 2"),
            (["--mesh", "2x4", "--dtype", "bf17"], "'bf17' is no dtype: use one of bf16, fp16"),
            (["--mesh", "4x4", "--topology", "dgx-h100", "--nodes", "1"], "has rank 15, but the topology 'dgx-h100'"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, options, message, capsys):
        assert main([*self.SIZES, *options]) == 1

        assert message in " ".join(capsys.readouterr().err.split())

    def test_a_mesh_is_written_by_sizes_or_names(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main([*self.SIZES, "--mesh", "2x"])

        assert "'2x' is no mesh: write its axes like 2x4 or dp=2,tp=4" in capsys.readouterr().err


class TestExplain:
    TENSORS = ("--mesh", "2x4", "--tensor", "x: 64x32 S(0) R", "--tensor", "w: 32x16 R S(1)")

    def test_an_expression_is_explained(self, capsys):
        assert main(["explain", "F.gelu(x @ w)", *self.TENSORS, "--topology", "dgx-a100"]) == 0

        text = capsys.readouterr().out
        assert "matmul   m k, k n -> m n   at <expression>:1" in text
        assert "topology dgx-a100: 8 x gpu (300 GB/s); as given" in text
        assert "chosen: d0:m d1:n, the cheapest of 17" in text
        assert "aten.gelu.default" in text

    def test_a_function_with_a_mesh_of_its_own(self, capsys, tmp_path):
        file = tmp_path / "model.py"
        file.write_text(
            "from dshard import Mesh, Shard, zeros\n\n"
            "def step():\n"
            "    x = zeros(8, 8, device_mesh=Mesh((4,), ('tp',), device_type='cuda'), placements=[Shard(1)])\n"
            "    return x.softmax(1)\n"
        )

        assert main(["explain", f"{file}:step", "--json"]) == 0

        found = json.loads(capsys.readouterr().out)[-1]
        assert found["op"] == "aten._softmax.default"
        assert found["line"] == f"{file}:5"
        assert (found["topology"], found["topology_why"]) == ("flat-cuda", "the default for cuda ranks")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["x @ v", *TENSORS], "name 'v' is not defined; there are torch, F, x, w"),
            (["x", "--tensor", "x: 4 R"], "--tensor needs the mesh on which it lies: give --mesh, as in --mesh 2x4"),
            (["x", "--mesh", "2x4", "--tensor", "x"], "'x' describes no tensor"),
        ],
    )
    def test_errors_say_the_way_out(self, arguments, message, capsys):
        assert main(["explain", *arguments]) == 1

        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "redistribute", "--mesh", "2x4", "--shape", "8x8", "--from", "R S(0)", "--to", "R R"],
        ["plan", "reshard", "--mesh", "2", "--to-mesh", "3", "--shape", "8x8", "--from", "S(0)", "--to", "R"],
        ["plan", "matmul", "--m", "64", "--k", "64", "--n", "64", "--mesh", "2x4"],
        ["explain", "x.sum()", "--mesh", "2x4", "--tensor", "x: 8x8 R S(0)"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_tables_are_written_as_html_and_svg(command, tmp_path, capsys):
    page, drawing = tmp_path / "page", tmp_path / "drawing"

    assert main([*command, "--html", str(page), "--svg", str(drawing)]) == 0

    first = capsys.readouterr().out.split()[0].strip("[]")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert drawing.read_text().startswith("<svg")
    assert first in page.read_text()
    assert first in drawing.read_text()


class TestTopology:
    def test_a_saved_topology_is_loaded_again(self, capsys, tmp_path):
        file = tmp_path / "machine.json"
        main(["topology", "--topology", "dgx-a100", "--nodes", "2", "--save", str(file), "--json"])
        saved = json.loads(capsys.readouterr().out)

        main(["topology", "--topology", str(file), "--json"])

        assert json.loads(capsys.readouterr().out) == saved
