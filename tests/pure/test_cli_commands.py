"""Every command, found by walking the parser: what all of them keep to."""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshard import launch
from dshard.tools.cli import _parser, main
from dshard.tools.report import console

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
"""
ENDS = ["--shape", "8x8", "--from", "S(0)", "--to", "R"]
STARTS = ("demo", "selftest", "topology measure")
"""They start ranks: `--json` of these is tested beside them."""

CALLS = {
    "plan redistribute": ["--mesh", "4", *ENDS],
    "plan reshard": ["--mesh", "2", "--to-mesh", "3", *ENDS],
    "plan matmul": ["--m", "64", "--k", "64", "--n", "64", "--mesh", "2x2"],
    "plan model": ["--devices", "4", "--model", "MODEL", "--batch", "8", "--sequence", "4"],
    "explain": ["x.sum()", "--mesh", "4", "--tensor", "x: 8x8 S(0)"],
    "topology": [],
    "simulate step": ["--model", "MODEL", "--batch", "8", "--sequence", "4", "--mesh", "4"],
    "simulate pipeline": ["--stages", "2", "--microbatches", "4"],
    "completion": ["bash"],
}
"""Arguments with which each of the others does something small."""


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each parser that runs something, with the words that lead to it."""
    if parser.get_default("command") is not None:
        yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, f"{path} {name}".strip())


COMMANDS = dict(commands(_parser()))


def call(path: str, tmp_path: Path) -> list[str]:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return [*path.split(), *(f"{file}:make" if word == "MODEL" else word for word in CALLS[path])]


def test_every_command_prints_for_machines_and_is_tried_here_or_starts_ranks() -> None:
    assert COMMANDS.keys() == {*CALLS, *STARTS}
    for path, parser in COMMANDS.items():
        assert "--json" in parser._option_string_actions, path
        assert parser.description, path
        assert [a.dest for a in parser._actions if not (a.help or isinstance(a, argparse._SubParsersAction))] == [], (
            path
        )


@pytest.mark.parametrize("path", CALLS)
def test_what_machines_read_is_all_that_is_printed(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*call(path, tmp_path), "--json"]) == 0

    said = capsys.readouterr()
    assert json.loads(said.out)
    assert said.err == ""


@pytest.mark.parametrize("path", [path for path in CALLS if path != "completion"])
def test_nothing_is_coloured_where_there_is_no_terminal(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(call(path, tmp_path)) == 0

    said = capsys.readouterr()
    assert said.out.strip()
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("path", CALLS)
def test_a_closed_pipe_or_a_full_disk_ends_without_a_traceback(
    path: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit, match="1"):  # as rich ends it
            main([*call(path, tmp_path), *options])
    assert capsys.readouterr().err == ""

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([*call(path, tmp_path), *options]) == 1
    assert capsys.readouterr().err == "error: stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan", "model", "--devices", "4", "--model", "MODEL", "--batch", "8", "--dtype", "x"],
            "'x' is no dtype",
        ),
        (["explain", "nowhere.py:step"], "nowhere.py"),
    ],
)
def test_what_cannot_be_is_one_line_and_no_traceback(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)

    assert main([f"{tmp_path}/model.py:make" if word == "MODEL" else word for word in words]) == 1

    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "0"], "'0' is not a whole number above zero"),
        (["--stages", "2", "--send", "-1"], "'-1' is not a number of at least zero"),
        (["--stages", "2", "--forward", "1,x"], "'x' is not a number of at least zero"),
    ],
)
def test_numbers_that_no_pipeline_has(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "pipeline", "--microbatches", "4", *options])

    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words", ["topology measure --out", "topology --save", "demo --plot", "topology measure --json --out"]
)
def test_a_file_that_cannot_be_written_is_refused_before_ranks_start(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("ranks were started"))
    for path, message in (
        ("/nowhere/at/all.json", "there is no directory '/nowhere/at'"),
        (str(tmp_path), "is no file to write to, but a directory: give the name of a file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*words.split(), path])
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_sign_of_life_appears_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is gone before anything is printed."""
    monkeypatch.setattr(console, "PATIENCE", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with console.waiting("planning"):
            said = _heard(ours, "planning")
    os.close(ours)

    assert "planning" in said


def _heard(terminal: int, word: str) -> str:
    """What a terminal was told until this word came, or nothing for ten seconds."""
    said = ""
    while word not in said and select.select([terminal], [], [], 10)[0]:
        said += os.read(terminal, 1 << 12).decode(errors="replace")
    return said
