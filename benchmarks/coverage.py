"""Every operator of torch's own list of samples (`op_db`) on distributed tensors, held against one device.

    python benchmarks/coverage.py [--ops PATTERN] [--samples 6] [--draws 3] [--state FILE] [--json] [--write]
    python benchmarks/coverage.py --device cuda [--part 2/8] ...      # on one GPU

Each operator is run on some of torch's samples, in float64 where it has that, its tensors laid out at random on meshes
of 4 and of 2 x 2 ranks simulated in this process: sharded, replicated and partial, uneven and empty shards included.
Values, dtypes, shapes and gradients must be those of plain torch; so must those of the in-place form, and what torch
refuses must be refused with torch's kind of error before anything is sent; on CUDA, where a kernel that refuses an
index ends the process, such calls are left out. With `--state` results are kept in a file, and a run that was stopped
goes on; `--part 2/8` is the second of eight parts, for processes side by side. `--write` puts the table into
docs/operators.md; with `--torch FILE`, the state of `coverage_torch.py`, which runs the same calls on torch's own
DTensor, also the counts of both beside each other.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from operator_cases import (
    Case,
    Draws,
    Trial,
    as_is,
    bad_inputs_of,
    compare,
    described,
    layout_for,
    meshes,
    name_of,
    operators,
    trials,
)
from operator_counts import Kept, Seen, beside, kept_in, put
from torch import Tensor

from dshard import DTensor, Layout, Replicate
from dshard.comm import listen
from dshard.dispatch.registry import known
from dshard.errors import DShardError
from dshard.ops.decompositions import decomposition_of
from dshard.ops.foreach import FOREACH
from dshard.tables import text_table
from dshard.testing import distribute, simulated, whole

CLASSES = {
    "rule": "correct by rule",
    "decomposition": "correct by decomposition",
    "fallback": "correct by fallback",
    "random": "random or uninitialised: shapes and dtypes right, values tested apart",
    "refused": "refused with a documented error",
    "wrong": "wrong",
    "none": "not counted: torch runs no sample with a strided tensor",
}
DOCS = Path(__file__).parent.parent / "docs" / "operators.md"
MAX_FAILURES = 8


@dataclass
class Result:
    """What was seen of one operator; `path` is the least direct way that one of its calls took."""

    op: str
    path: str = "rule"
    calls: int = 0
    gradients: int = 0
    in_place: int = 0
    bad_inputs: int = 0
    refused: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    random: bool = False
    seconds: float = 0.0
    seen: list[Seen] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One of CLASSES."""
        if self.failures:
            return "wrong"
        if self.refused:
            return "refused"
        if not self.calls:
            return "none"
        return "random" if self.random else self.path


class TooSlow(Exception):
    """An operator took longer than it may."""


# -- one operator


def check_op(
    op: Any, samples: int, draws: int, seed: int = 0, limit: int = 120, bad_inputs: int = 1000, device: str = "cpu"
) -> Result:
    """The checks of one entry of op_db."""
    result, start = Result(name_of(op)), time.perf_counter()
    try:
        with time_limit(limit):
            for trial in trials(op, samples, draws, seed, device):
                check_trial(trial, result)
            draw = Random(zlib.crc32(f"{name_of(op)} {seed} refused".encode()))
            for bad in bad_inputs_of(op, device)[:bad_inputs]:
                check_bad_input(op, bad, draw, result)
    except TooSlow:
        result.failures.append(f"took more than {limit} s")
    except Exception:
        result.failures.append(f"cannot be asked: {traceback.format_exc(limit=-3)}")
    result.seconds = time.perf_counter() - start
    return result


def check_trial(trial: Trial, result: Result) -> None:
    """One call in the layouts drawn for it."""
    expected, uninitialised = trial.expected, "empty" in result.op
    paths: set[Any] = set()
    forward = backward = "error"
    result.random |= trial.random
    try:
        with simulated(trial.mesh):
            with torch.enable_grad():
                tensors = laid_out(trial.case, trial.layouts, trial.wanted)
            with recording(paths):
                got = trial.case.run(tensors, trial.wanted, expected.weights, whole_weight)
            outputs, written, gradients = (
                gather(found, uninitialised) for found in (got.outputs, tensors[: len(trial.written)], got.gradients)
            )
        forward = "wrong"
        compare(expected.outputs, outputs, "output", trial.random)
        compare(trial.written, written, "written operand", trial.random)
        forward, backward = "right", "wrong"
        if not trial.random:
            compare(expected.gradients, gradients, "gradient", False)
        backward = "right"
    except TooSlow:
        raise
    except DShardError as error:
        note(result.refused, f"{trial}: {type(error).__name__}: {error}")
    except Exception as error:
        note(result.failures, f"{trial}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        result.calls += 1
        result.gradients += bool(expected.gradients)
        result.in_place += trial.in_place
    if not trial.in_place:
        result.seen.append((trial.mesh.ndim, forward, backward if expected.gradients else ""))
    note_paths(paths, trial, result)


def note_paths(paths: set[Any], trial: Trial, result: Result) -> None:
    """Keep the least direct way."""
    order = ("rule", "decomposition", "fallback")
    for func, path in paths:
        if path == "fallback":
            result.fallbacks = sorted({*result.fallbacks, str(func)})
        if not trial.in_place and order.index(path) > order.index(result.path):
            result.path = path


def laid_out(case: Case, layouts: Sequence[Layout], wanted: Sequence[bool]) -> list[Tensor]:
    """The operands as distributed tensors."""
    tensors: list[Tensor] = [
        distribute(x, layout, seed=n) for n, (x, layout) in enumerate(zip(case.tensors(), layouts, strict=True))
    ]
    return [x.requires_grad_(w) if w else x for x, w in zip(tensors, wanted, strict=True)]


def whole_weight(weight: Tensor, out: Any) -> Tensor:
    """The weight of an output, whole on all ranks."""
    return distribute(weight, Layout(out.layout.mesh, (Replicate(),) * out.layout.mesh.ndim))


def note(notes: list[str], text: str) -> None:
    if len(notes) < MAX_FAILURES:
        notes.append(text)


def path_of(func: Any, args: Any) -> str:
    """The path of a call: its rule, other operators, or the fallback that replicates on every rank."""
    facts = known(func)
    if facts.composed is not None and facts.composed.applies(args):
        return "rule" if facts.composed.local else "decomposition"
    if facts.op is not None or func in FOREACH:
        return "rule"
    return "fallback" if decomposition_of(func) is None else "decomposition"


@contextmanager
def recording(paths: set[Any]) -> Iterator[None]:
    """Note which operators reach distributed tensors, from outside, and by which way each goes."""
    original = DTensor.__dict__["__torch_dispatch__"]
    depth = 0

    def wrapped(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal depth
        if depth == 0:
            paths.add((func, path_of(func, args)))
        depth += 1
        try:
            return original.__func__(func, types, args, kwargs)
        finally:
            depth -= 1

    wrapped.__func__ = wrapped  # type: ignore[attr-defined]  # torch asks for it, as of a class method
    DTensor.__torch_dispatch__ = staticmethod(wrapped)
    try:
        yield
    finally:
        DTensor.__torch_dispatch__ = original


def gather(values: Sequence[Any], uninitialised: bool) -> list[Any]:
    """The values on one device, their parts checked."""
    found = []
    for value in values:
        assert not isinstance(value, Tensor) or isinstance(value, DTensor), f"a plain {type(value).__name__}"
        if isinstance(value, Tensor):
            found.append(
                torch.empty(value.shape, dtype=value.dtype, device=value.device)
                if uninitialised
                else whole(value.detach())
            )
        else:
            found.append(value)
    return found


def check_bad_input(op: Any, bad: Any, draw: Random, result: Result) -> None:
    """What torch refuses is refused with the same kind of error, before anything is sent.

    Not where torch itself computes before it refuses, or where it refuses the values rather than the shapes.
    """
    case = Case.of(op.op, bad.sample_input)
    plain = [False] * len(case.tensors())
    try:
        with Draws() as before:
            case.run([x.clone() for x in case.tensors()], plain, None, as_is)
        return
    except Exception as error:
        kind = type(error)
    mesh = meshes("cpu")[0]
    laid = [layout_for(x, mesh, draw) for x in case.tensors()]
    told = f"bad input {described(case, laid)}"
    sent: list[Any] = []
    try:
        with simulated(mesh):
            tensors = laid_out(case, laid, plain)
            with listen(sent.append):
                case.run(tensors, plain, None, as_is)
    except TooSlow:
        raise
    except Exception as error:
        result.bad_inputs += 1
        if not isinstance(error, kind):
            message = " ".join(str(error).split())[:200]
            note(result.failures, f"{told}: {type(error).__name__}, not {kind.__name__}: {message}")
        elif sent and not before.done and not by_value(case):
            note(result.failures, f"{told}: refused after {len(sent)} collectives ({kind.__name__})")
    else:
        note(result.failures, f"{told}: not refused ({kind.__name__})")


def by_value(case: Case) -> bool:
    """Whether other values in tensors of these shapes are not refused: what is in them must be read first."""
    try:
        plain = [torch.ones_like(x) if x.is_floating_point() else torch.zeros_like(x) for x in case.tensors()]
        case.called(plain)
    except Exception:
        return False
    return True


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TooSlow after so many seconds of this process's own time: others may keep the machine busy."""

    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- all of them


def run_all(options: argparse.Namespace) -> list[Result]:
    kept = Kept(options.state, {name: Result(**row) for name, row in kept_in(options.state).items()})
    part, parts = map(int, options.part.split("/"))
    todo = operators(options.ops)[part - 1 :: parts]
    bad_inputs = 1000 if options.device == "cpu" else 0
    results = []
    for i, op in enumerate(todo):
        name = name_of(op)
        if name not in kept.rows:
            kept.write({"op": name, "failures": ["the process ended"]})
            kept.rows[name] = check_op(
                op, options.samples, options.draws, options.seed, bad_inputs=bad_inputs, device=options.device
            )
            kept.write(asdict(kept.rows[name]))
        results.append(kept.rows[name])
        if sys.stderr.isatty():
            print(f"\r{i + 1:4}/{len(todo)} {name:60.60}", end="", file=sys.stderr, flush=True)
    return results


def counted(results: Sequence[Result]) -> list[list[str]]:
    """How many operators are in each class, and how many calls were compared."""
    found = Counter(result.verdict for result in results)
    measured = len(results) - found["none"]
    right = measured - found["refused"] - found["wrong"]
    rows: list[tuple[str, object]] = [(meaning, found[verdict]) for verdict, meaning in CLASSES.items()]
    rows += [
        ("all entries of op_db", len(results)),
        ("correct, of those counted", f"{100 * right / max(measured, 1):.1f} %"),
        ("calls compared", sum(result.calls for result in results)),
        ("of these with gradients", sum(result.gradients for result in results)),
        ("of these in place", sum(result.in_place for result in results)),
        ("refused arguments compared", sum(result.bad_inputs for result in results)),
    ]
    return [[meaning, str(n)] for meaning, n in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a regular expression: only operators whose names it matches")
    parser.add_argument("--samples", type=int, default=6, help="samples of each operator")
    parser.add_argument("--draws", type=int, default=3, help="layouts of each sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where all tensors are")
    parser.add_argument("--part", default="1/1", help="the operators of one process, as 2/8")
    parser.add_argument("--state", help="keep results here, and go on from them")
    parser.add_argument("--torch", help="what coverage_torch.py has kept: shown beside")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/operators.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = run_all(options)
    tables = {
        "counts" if options.device == "cpu" else "counts on cuda": (["operators", "count"], counted(results)),
    }
    if options.torch:
        theirs = {name: row["seen"] for name, row in kept_in(options.torch).items()}
        tables["beside"] = beside({result.op: result.seen for result in results}, theirs)
    if options.write:
        for name, (header, rows) in tables.items():
            put(DOCS, name, header, rows)
    if options.json:
        print(json.dumps([{**asdict(result), "verdict": result.verdict} for result in results], indent=1))
        return
    for result in results:
        for text in (*result.failures, *result.refused):
            print(f"{result.verdict:8} {result.op}: {text}")
    for header, rows in tables.values():
        print(text_table(header, rows))


if __name__ == "__main__":
    main()
