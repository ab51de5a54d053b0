"""Every file that asks for the type of a device stands in the design note, with what runs its branches."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKS = re.compile(r"device\.type\b|device_type\b|kernel_device\(|\.is_cuda\b|torch\.cuda\.(?!graphs)|device == \"c")


def test_places_that_ask_for_a_device_are_in_the_design_note() -> None:
    note = (ROOT / "docs" / "design" / "0022-kernels-of-cuda.md").read_text()
    listed = re.findall(r"`([\w/*]+(?:\.py|/\*))`", note.split("**Places")[1].split("A pure test")[0])
    asking = [
        str(path.relative_to(ROOT / "dshard"))
        for path in sorted((ROOT / "dshard").rglob("*.py"))
        if ASKS.search(re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL))
    ]

    assert [path for path in asking if not any(fnmatch(path, each) for each in listed)] == []
    assert [each for each in listed if not any(fnmatch(path, each) for path in asking)] == []
