"""The part of a page, docs/benchmarks.md unless said, that a script writes: between its own two markers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def write_section(name: str, text: str, document: Path = DOCUMENT) -> None:
    """Put `text` between `<!-- name: begin -->` and `<!-- name: end -->`.

    Raises:
        ValueError: the document lacks a marker.
    """
    before, begin, rest = document.read_text().partition(f"<!-- {name}: begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not begin or not end:
        raise ValueError(f"{document} has no section {name!r}: add its begin and end markers")
    document.write_text(f"{before}{begin}{text.strip()}\n{end}{after}")


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
