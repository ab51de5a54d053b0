"""Tables as plain text, and quantities as people write them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a header, in columns.

    >>> print(text_table(["axis", "bytes"], [["dp", "12"], ["tp", "7"]]))
    axis  bytes
    ----  -----
    dp    12
    tp    7
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def human_bytes(nbytes: float) -> str:
    """Bytes with a binary unit.

    >>> human_bytes(1536), human_bytes(12)
    ('1.5 KiB', '12 B')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def human_seconds(seconds: float) -> str:
    """Seconds as milliseconds of four digits.

    >>> human_seconds(0.0123456), human_seconds(16.57)
    ('12.35 ms', '16,570 ms')
    """
    ms = seconds * 1e3
    return f"{ms:.4g} ms" if ms < 9999.5 else f"{ms:,.0f} ms"


def short_line(line: str) -> str:
    """A line of source, "file:number", with the file relative to installed packages or to where the program runs.

    >>> short_line(os.path.join(os.getcwd(), "models", "net.py:12"))
    'models/net.py:12'
    """
    packages = [folder for folder in sys.path if "-packages" in folder]
    for folder in (*packages, os.getcwd(), *filter(None, sys.path)):
        if line.startswith(os.path.join(folder, "")):
            return os.path.relpath(line, folder)
    return line
