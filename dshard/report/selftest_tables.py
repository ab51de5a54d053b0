"""The results of the self-test: one table, and the report of what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from dshard.report.console import count, table
from dshard.selftest import Result

_LINES = 60  # of an error in a report


def selftest_table(results: Sequence[Result], machine: Mapping[str, str]) -> Table:
    """One line for each check on each backend."""
    rows = [
        (each.backend, each.check, "passed" if each.passed else "FAILED", f"{each.seconds:.1f}", _first_line(each))
        for each in results
    ]
    drawn = table(("backend", "check", "", ">time/s", "compared"), rows)
    drawn.title = "dshard selftest: " + ", ".join(f"{name} {value}" for name, value in machine.items())
    passed = sum(each.passed for each in results)
    drawn.caption = f"{passed} of {len(results)} passed."
    return drawn


def selftest_failures(failed: Sequence[Result], machine: Mapping[str, str]) -> str:
    """Text to send to the maintainers, of those checks that failed."""
    lines = [f"{count(len(failed), 'check')} failed; please open an issue with what follows"]
    lines += [f"{name}: {value}" for name, value in machine.items()]
    for each in failed:
        lines += ["", f"--- {each.backend}, {each.check}", *each.detail.splitlines()[:_LINES]]
    return "\n".join(lines)


def _first_line(result: Result) -> str:
    return result.detail.partition("\n")[0][:200]
