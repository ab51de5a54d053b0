"""Tables of a self-test."""

from __future__ import annotations

from rich.table import Table

from dshard.tools.report.console import count, table
from dshard.tools.selftest import Result, SelfTest

_LINES = 60  # of an error in a report


def selftest_table(selftest: SelfTest) -> Table:
    """One line for each check on each backend."""
    rows = [
        (each.backend, each.check, "passed" if each.passed else "FAILED", f"{each.seconds:.1f}", _first_line(each))
        for each in selftest.results
    ]
    drawn = table(("backend", "check", "", ">time/s", "compared"), rows)
    drawn.title = "dshard selftest: " + ", ".join(f"{name} {value}" for name, value in selftest.machine.items())
    drawn.caption = f"{len(rows) - len(selftest.failed)} of {len(rows)} passed."
    return drawn


def selftest_failures(selftest: SelfTest) -> str:
    """Format the failed checks as text to send to the maintainers."""
    lines = [f"{count(len(selftest.failed), 'check')} failed; please open an issue with what follows"]
    lines += [f"{name}: {value}" for name, value in selftest.machine.items()]
    for each in selftest.failed:
        lines += ["", f"--- {each.backend}, {each.check}", *each.detail.splitlines()[:_LINES]]
    return "\n".join(lines)


def _first_line(result: Result) -> str:
    return result.detail.partition("\n")[0][:200]
