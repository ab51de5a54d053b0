"""Commands in narrow terminals, on devices of known memory, and interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in

from dshard.launch import processes
from dshard.tools.cli import _parser, main
from dshard.tools.cli.completion import words_of


@pytest.fixture(name="model")
def model_file(tmp_path: Path) -> str:
    """A model whose weights, gradients and optimiser take 10 GB."""
    file = tmp_path / "config.json"
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    file.write_text(json.dumps({"model_type": "llama", **config}))
    return str(file)


NAMED = ("--strategy", "fsdp", "--strategy", "data")


def planned(model: str, *more: str) -> int:
    return main(["plan", "model", "--devices", "2", "--model", model, "--batch", "4", "--sequence", "512", *more])


def test_plan_model_keeps_within_the_memory_of_a_presets_devices(model: str, capsys: Any) -> None:
    assert planned(model, "--topology", "dgx-h100", "--json", *NAMED) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] == 80e9
    assert [row["fits"] for row in found["plans"]] == [row["memory"]["total"] <= 80e9 for row in found["plans"]]
    assert len(found["plans"]) == 2

    assert planned(model, "--topology", "dgx-h100", *NAMED[:2]) == 0
    assert "74.51 GiB of each device, on dgx-h100" in " ".join(capsys.readouterr().out.split())


def test_plan_model_says_where_no_limit_is_known_and_what_does_not_fit(model: str, capsys: Any) -> None:
    assert planned(model, "--topology", "cpu", *NAMED[:2]) == 0
    assert "no memory limit is known: give --memory" in " ".join(capsys.readouterr().out.split())

    assert planned(model, "--topology", "dgx-h100", "--memory", "12GB") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "left out: weights and moments alone do not fit" in told
    assert "planned: " in told

    assert planned(model, "--topology", "dgx-h100", "--memory", "1GB", "--json", *NAMED) == 0
    rows = json.loads(capsys.readouterr().out)["plans"]
    assert len(rows) == 2
    assert not any(row["fits"] for row in rows)
    assert [row["memory"]["total"] for row in rows] == sorted(row["memory"]["total"] for row in rows)


@pytest.mark.parametrize("columns", one_in(2, [80, 100]))
def test_tables_fit_the_columns(model: str, capsys: Any, monkeypatch: Any, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))

    planned(model, "--topology", "dgx-h100")
    main(["simulate", "pipeline", "--stages", "4", "--microbatches", "16", "--schedule", "1f1b"])
    main(["plan", "matmul", "--m", "512", "--k", "512", "--n", "512", "--mesh", "2x4"])

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)


def test_tables_break_no_placement_and_no_number(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tensors = ["--tensor", "x: 4096x8192 S(0) R", "--tensor", "w: 8192x8192 R S(1)"]

    main(["explain", "F.gelu(x @ w)", "--mesh", "dp=2,tp=4", *tensors])

    told = capsys.readouterr().out
    assert "1374394.5" in told
    assert "dp:P(sum)" in told
    assert all(line.count("(") == line.count(")") for line in told.splitlines()), told


@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_the_columns(columns: int, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    commands = [words.split() for words, _ in words_of(_parser())]

    for command in commands:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns, command
    assert ["plan", "model"] in commands


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path, capsys: Any) -> None:
    broken, binary = tmp_path / "broken.py", tmp_path / "binary.json"
    broken.write_text("def (")
    binary.write_bytes(b"\xff")

    for arguments, said in (
        (["explain", f"{broken}:step"], f"cannot import '{broken}': SyntaxError: "),
        (["explain", "no_such_module:step"], "cannot import 'no_such_module': ModuleNotFoundError: "),
        (["topology", "--topology", str(binary)], f"cannot read the topology '{binary}': it is no text\n"),
        (["topology", "--topology", f"{tmp_path}/none.json"], "none.json': No such file or directory\n"),
        (["topology", "--topology", ""], "no preset is called ''"),
    ):
        assert main(arguments) == 1
        printed = capsys.readouterr()
        assert said in printed.err
        assert (printed.out, printed.err.count("\n"), printed.err.count("Errno")) == ("", 1, 0)


HUGE = "9" * 25
TOO_MUCH = [
    ("demo --ranks 100000", "100,000 ranks are too many processes for this host: ask for at most"),
    ("selftest --ranks 100000", "or start more on several hosts with torchrun"),
    ("plan model --devices 1000000000 --model x --batch 8", "1,000,000,000 devices are too many: a mesh has at most"),
    ("plan matmul --m 8 --k 8 --n 8 --mesh 2x2x2x2x2x2", "has 1,000,000 schedules: give the layouts of both operands"),
    (f"plan matmul --m {HUGE} --k 8 --n 8 --mesh 2x2", f"argument --m: {HUGE} is too large: give at most"),
    (f"plan redistribute --mesh 2 --shape 8x{HUGE} --from R --to R", f"argument --shape: {HUGE} is too large"),
    ("simulate pipeline --stages 4 --microbatches 100000", "4 stages of 100,000 microbatches: simulate at most"),
    ("demo --ranks 1 --device cuda", "1 rank on CUDA needs a GPU and this host has 0: ask for the CPU"),
    ("plan matmul --m 8 --k 8 --n 8 --mesh=--", "dshard: error: --mesh=--: give a value after the ="),
    ("simulate step --model '' --batch 1", "the model '' cannot be read: No such file or directory"),
    ("simulate step --model pyproject.toml --batch 1", "pyproject.toml: the model is no JSON: "),
    ("simulate pipeline --stages 4 --microbatches 4 --skip 3-1", "error: the edge skip 3->1 must go from a stage to"),
]


@pytest.mark.parametrize(("command", "said"), TOO_MUCH)
def test_what_cannot_be_is_refused_before_work(command: str, said: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with contextlib.suppress(SystemExit):  # how argparse refuses
        assert main(shlex.split(command)) == 1

    assert said in capsys.readouterr().err


def test_a_mesh_to_measure_is_checked_like_any(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["topology", "measure", "--mesh", "0"])
    assert "argument --mesh: a mesh of shape (0,): give each axis at least one rank" in capsys.readouterr().err


def test_an_interrupt_while_torch_is_imported_leaves_no_traceback() -> None:
    command = [sys.executable, "-u", "-m", "dshard", "plan", "--help"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and "libtorch" not in maps.read_text():
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)

    assert told == b""
    assert process.returncode == -signal.SIGINT


def test_the_server_of_ranks_starts_with_interrupts_blocked(monkeypatch: Any) -> None:
    blocked = []
    monkeypatch.setattr(
        forkserver, "ensure_running", lambda: blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    )

    processes._start_server()

    assert signal.SIGINT in blocked[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def _group(number: int) -> list[Path]:
    """The directories in /proc of the processes of a group that have not ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            if int(group) == number and state != "Z":
                found.append(file.parent)
    return found


def _imports_torch(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return b"forkserver" in (process / "cmdline").read_bytes() and "libtorch" in (process / "maps").read_text()
    return False


@pytest.mark.thorough
def test_an_interrupt_while_ranks_import_torch_leaves_no_process_and_no_traceback() -> None:
    command = [sys.executable, "-m", "dshard", "selftest"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        while process.poll() is None and not any(map(_imports_torch, _group(process.pid))):
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(10)
        time.sleep(1)
        left = _group(process.pid)
        _, told = process.communicate(timeout=60)

    assert process.returncode == 130
    assert not left
    assert b"Traceback" not in told


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [2.0, 3.0, 4.0])
def test_an_interrupted_command_leaves_no_traceback(seconds: float) -> None:
    command = [
        sys.executable,
        "-m",
        "dshard",
        "plan",
        "matmul",
        *["--m", "4096", "--k", "8192", "--n", "65536", "--mesh", "4x4x4x4"],
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)

    assert b"Traceback" not in told
    assert process.returncode in (0, 130, -signal.SIGINT)
