"""What is shown to people: lines of source in tables, and the progress of a search."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

from dshard import Mesh
from dshard.parallel import plan_model
from dshard.tables import short_line
from dshard.tools.report import drawing_of
from dshard.trace import EXPERT_HEADINGS, Trace, TracedExperts


def test_lines_are_shown_from_the_packages_or_from_where_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = "/home/me/project/venv/lib/python3/site-packages"
    monkeypatch.setattr(sys, "path", ["", "/home/me/project", packages, "/srv"])
    monkeypatch.setattr(os, "getcwd", lambda: "/home/me/project")
    shown = {
        "/home/me/project/models/net.py:3": "models/net.py:3",
        f"{packages}/transformers/llama.py:9": "transformers/llama.py:9",
        "/srv/shared/train.py:1": "shared/train.py:1",
        "/home/me/projects/other.py:7": "/home/me/projects/other.py:7",
        "?": "?",
    }

    assert {line: short_line(line) for line in shown} == shown


def test_the_search_for_the_cheapest_plan_is_counted_on_a_terminal_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dshard.parallel.auto.PATIENCE", 0.0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    said = []
    for is_terminal, rank in ((True, "0"), (True, "1"), (False, "0")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("RANK", rank)
        plan_model(model, Mesh((2,)), "auto", torch.randn(4, 8))
        said.append(capsys.readouterr().err)

    assert "auto: 1 plans priced" in said[0]
    assert said[0].endswith("\r\x1b[K")  # the line is empty again
    assert said[1:] == ["", ""]


def test_the_table_of_a_trace_has_the_headings_of_layers_of_experts() -> None:
    counts = torch.tensor([3, 1])
    call = TracedExperts("Net.moe", "net.py:3", "ragged", 4, 6, 32, counts, True, (range(1), range(1, 2)))

    drawn: Any = drawing_of(Trace(experts=[call]))

    assert [column.header for column in drawn.renderables[-1].columns] == [*EXPERT_HEADINGS]
