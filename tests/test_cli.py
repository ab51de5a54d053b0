"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from dshard import __version__, demo, report
from dshard.cli import main
from dshard.demo import Row, Settings
from dshard.errors import RankError

ROWS = [
    Row("single", "1 device", 0.072, 0.0, 0.975, 0, 0, 3.6),
    Row("data x tensor", "dp=2 tp=2", 0.0720001, 2.4e-07, 0.975, 1041, 2_202_009, 116.04),
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
    assert "data x tensor  dp=2 tp=2  0.07200  2.4e-07     97.5%    1,041  2.1 MiB   116.0" in text


@pytest.mark.ranks
def test_the_demo_from_end_to_end() -> None:
    command = [sys.executable, "-m", "dshard.cli", "demo", "--json", "--steps", "5", "--device", "cpu"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["mesh"] for row in rows] == ["1 device", "dp=4", "tp=4", "dp=2 tp=2"]
    assert max(row["max_loss_diff"] for row in rows) < 1e-5


class TestPlan:
    REDISTRIBUTE = ("plan", "redistribute", "--mesh", "dp=2,tp=4", "--shape", "2048x2048")

    def test_redistribute_prints_each_step(self, capsys):
        status = main([*self.REDISTRIBUTE, "--from", "dp:P(sum) tp:R", "--to", "dp:S(0) tp:S(0)"])

        assert status == 0
        assert "reduce_exchange" in capsys.readouterr().out

    def test_redistribute_tells_machines_the_bytes_of_each_step(self, capsys):
        main([*self.REDISTRIBUTE, "--from", "dp:R tp:S(0)", "--to", "dp:R tp:R", "--itemsize", "4", "--json"])

        found = json.loads(capsys.readouterr().out)

        assert [(step["step"], step["axes"]) for step in found["steps"]] == [("all_gather", "tp")]
        assert found["steps"][0]["nbytes"] == 2048 * 2048 * 4 * 3 // 4

    def test_a_layout_that_cannot_be_is_one_line(self, capsys):
        status = main([*self.REDISTRIBUTE, "--from", "dp:S(2) tp:R", "--to", "dp:R tp:R"])

        assert status == 1
        assert "S(2) is out of range" in capsys.readouterr().err

    def test_meshes_are_ranked(self, capsys):
        main(["plan", "mesh", "--devices", "8", "--hidden", "64", "--tokens", "128", "--json"])

        rows = json.loads(capsys.readouterr().out)["rows"]

        assert sorted(tuple(row["mesh"]) for row in rows) == [(1, 8), (2, 4), (4, 2), (8, 1)]
        assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)

    def test_an_unknown_machine_names_those_there_are(self, capsys):
        status = main(["plan", "mesh", "--devices", "8", "--hidden", "64", "--tokens", "128", "--topology", "abacus"])

        assert status == 1
        assert "dgx-h100" in capsys.readouterr().err


class TestTopology:
    def test_a_saved_topology_is_loaded_again(self, capsys, tmp_path):
        file = tmp_path / "machine.json"
        main(["topology", "--topology", "dgx-a100", "--nodes", "2", "--save", str(file), "--json"])
        saved = json.loads(capsys.readouterr().out)

        main(["topology", "--topology", str(file), "--json"])

        assert json.loads(capsys.readouterr().out) == saved
