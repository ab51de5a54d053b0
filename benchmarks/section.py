"""The part of docs/benchmarks.md that a benchmark writes: between its own two markers, nothing else is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def write_section(name: str, text: str) -> None:
    """Put `text` between `<!-- name: begin -->` and `<!-- name: end -->`.

    Raises:
        ValueError: the document lacks a marker.
    """
    before, begin, rest = DOCUMENT.read_text().partition(f"<!-- {name}: begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} has no section {name!r}: add its begin and end markers")
    DOCUMENT.write_text(f"{before}{begin}{text.strip()}\n{end}{after}")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown.

    >>> print(markdown_table(["ranks", "ms"], [["4", "1.5"]]))
    | ranks | ms |
    |---|---|
    | 4 | 1.5 |
    """
    lines = [header, *rows]
    cells = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([cells[0], "|" + "---|" * len(header), *cells[1:]])
