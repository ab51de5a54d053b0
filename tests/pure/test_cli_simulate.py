"""`dshard simulate pipeline`: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from dshard.pipeline import Program, StageCost, chain, simulate, uniform
from dshard.tools.cli import main

FOUR = ["simulate", "pipeline", "--stages", "4", "--microbatches", "16", "--send", "0.5"]


def said(capsys, *arguments):
    assert main([*FOUR, *arguments]) == 0
    return capsys.readouterr().out


def test_a_timeline_has_a_line_for_each_stage(capsys):
    out = said(capsys, "--schedule", "eager-1f1b", "--activation", str(2**30))

    lines = {line.split()[0]: line for line in out.splitlines() if line.split()[:1]}
    assert "60 s; with messages of one byte 57 s, 5.3% above that" in out
    assert lines["0"].split()[-3:] == ["7", "7", "GiB"]
    assert lines["3"].split()[-3:] == ["1", "1", "GiB"]
    assert lines["0"].split()[1].startswith("F")
    assert lines["3"].split()[1].startswith("..")
    assert {len(lines[str(stage)].split()[1]) for stage in range(4)} == {72}


def test_data_are_those_of_the_simulator(capsys):
    found = json.loads(said(capsys, "--schedule", "1f1b", "--delay", "0", "--json"))

    timeline = simulate(Program("1f1b", 4, 16, chain(4), 0), uniform(4, chain(4), StageCost(), 0.5))
    assert found["makespan"] == timeline.makespan
    assert found["stages"] == json.loads(json.dumps(timeline.data()["stages"]))
    assert (found["schedule"], found["delay"], found["overlap"]) == ("1f1b", 0, True)


def test_auto_keeps_within_the_budget_and_all_compares(capsys):
    own = ("--activation", "10", "--backward-weight", "0")

    free = json.loads(said(capsys, *own, "--json"))
    tight = json.loads(said(capsys, *own, "--json", "--budget", "45"))
    ranked = json.loads(said(capsys, *own, "--json", "--schedule", "all"))

    assert tight["peak_bytes"] <= 45 < free["peak_bytes"]
    assert free["makespan"] == ranked[0]["makespan"] == min(choice["makespan"] for choice in ranked)
    assert len(ranked) == 9
    assert "eager-1f1b" in said(capsys, *own, "--schedule", "all")


def test_a_trace_is_written(capsys, tmp_path):
    file = tmp_path / "trace.json"

    said(capsys, "--schedule", "gpipe", "--skip", "0-3", "--trace", str(file))

    events = json.loads(file.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names[:4] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert "0 to 3" in names
    assert "3 to 0" in names


def test_without_overlap_it_takes_longer(capsys):
    assert "74.5 s" in said(capsys, "--schedule", "1f1b", "--no-overlap")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "2f2b"], "there is no schedule '2f2b'"),
        (["--forward", "1,2"], "--forward has 2 numbers for 4 stages: give one, or 4"),
        (["--skip", "3-0"], "must go from a stage to a later one of 4"),
        (["--activation", "10", "--budget", "9"], "no schedule of 16 microbatches keeps within 9 bytes"),
    ],
)
def test_what_cannot_be_is_an_error(capsys, arguments, message):
    assert main([*FOUR, *arguments]) == 1
    assert message in capsys.readouterr().err
