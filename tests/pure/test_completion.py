"""Shell completion knows what the parser knows."""

from __future__ import annotations

import subprocess

import pytest

from dshard.tools.cli import _parser, main
from dshard.tools.cli.completion import script, words_of


def complete(line: str, *, tail: str = "") -> list[str]:
    """What bash offers after these words."""
    words = ["dshard", *line.split(), tail]
    program = script(_parser(), "bash") + "\n"
    program += f"COMP_WORDS=({' '.join(w or chr(34) * 2 for w in words)}); COMP_CWORD={len(words) - 1}\n"
    program += '_dshard; printf "%s\\n" "${COMPREPLY[@]}"'
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_commands_and_options_are_completed() -> None:
    assert {"plan", "simulate", "completion"} <= set(complete(""))
    assert complete("pl", tail="") != complete("plan")
    assert complete("", tail="simu") == ["simulate"]
    assert complete("completion", tail="z") == ["zsh"]
    assert "--json" in complete("simulate step", tail="--j")
    assert "--model" in complete("simulate step --batch 4", tail="--m")


def test_every_command_has_its_words() -> None:
    found = dict(words_of(_parser()))

    assert all("--help" in words for words in found.values())


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_command_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == script(_parser(), shell) + "\n"
