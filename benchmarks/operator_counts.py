"""What coverage runs keep and how it is counted: on dshard and on torch's DTensor alike."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from section import markdown_table

Seen: TypeAlias = tuple[int, str, str]
"""Of one call: how many axes the mesh has; forward right, wrong, error or hang; the same of backward, or "" if none."""

WORST = ("wrong", "hang", "error", "right")


@dataclass
class Kept:
    """Results by the name of the operator, each written to a file as soon as it is known."""

    path: str | None
    rows: dict[str, Any]

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row to the file; a later one of the same operator takes its place."""
        if self.path:
            with Path(self.path).open("a") as file:
                file.write(json.dumps(row) + "\n")


def kept_in(path: str | None) -> dict[str, dict[str, Any]]:
    """The rows of a file by operator, the last of each; none where there is no file."""
    if path is None or not Path(path).exists():
        return {}
    return {row["op"]: row for row in map(json.loads, Path(path).read_text().splitlines())}


def worst(verdicts: Sequence[str]) -> str:
    """What is said of an operator by the verdicts on its calls.

    >>> worst(["right", "error", "hang"]), worst(["right", "right"])
    ('hang', 'right')
    """
    return min(verdicts, key=WORST.index)


def tally(seen: Mapping[str, Sequence[Seen]], axes: int) -> dict[str, int]:
    """Operators counted by what was seen of them on the mesh with so many axes."""
    found = dict.fromkeys(
        ("operators", "forward", "with gradients", "both", "wrong", "hang", "error", "calls", "ok"), 0
    )
    for rows in seen.values():
        mine = [(forward, backward) for n, forward, backward in rows if n == axes]
        if not mine:
            continue
        forward = worst([forward for forward, _ in mine])
        backward = [backward for _, backward in mine if backward]
        every = worst([forward, *backward])
        found["operators"] += 1
        found["forward"] += forward == "right"
        found["with gradients"] += bool(backward)
        found["both"] += bool(backward) and every == "right"
        found["calls"] += len(mine)
        found["ok"] += sum(forward == "right" and backward in ("", "right") for forward, backward in mine)
        if every != "right":
            found[every] += 1
    return found


ROWS = {
    "operators": "operators asked",
    "forward": "right values in every call",
    "with gradients": "operators with gradients",
    "both": "of these, right values and gradients in every call",
    "wrong": "wrong values or gradients in some call",
    "hang": "a rank waits for ever, or ends, in some call; none wrong",
    "error": "an error in some call; none wrong, none waits",
    "calls": "calls",
    "ok": "right calls",
}


def beside(
    ours: Mapping[str, Sequence[Seen]], theirs: Mapping[str, Sequence[Seen]]
) -> tuple[list[str], list[list[str]]]:
    """The counts of both, of the operators that both were asked, on each mesh."""
    both = {name for name in ours if ours[name]} & set(theirs)
    header = ["", "dshard, 4", "torch's DTensor, 4", "dshard, 2 x 2", "torch's DTensor, 2 x 2"]
    columns = [
        tally({name: rows for name, rows in side.items() if name in both}, axes)
        for axes in (1, 2)
        for side in (ours, theirs)
    ]
    return header, [[meaning, *(f"{column[row]:,}" for column in columns)] for row, meaning in ROWS.items()]


def put(page: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Put a table between the markers of this name.

    Raises:
        ValueError: the page has no such markers.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    body = f"{begin}\n{markdown_table(header, rows)}\n{end}"
    text, found = re.subn(f"{begin}.*{end}", lambda _: body, page.read_text(), flags=re.DOTALL)
    if not found:
        raise ValueError(f"{page} has no markers {name!r}")
    page.write_text(text)
