"""Every operator of torch's own list of samples (`op_db`) on distributed tensors, held against one device.

    python benchmarks/coverage.py [--ops PATTERN] [--samples 6] [--draws 3] [--state FILE] [--json] [--write]

Each operator is run on some of torch's samples, in float64 where it has that, its tensors laid out at random on meshes
of 4 and of 2 x 2 ranks simulated in this process: split, whole and pending, uneven and empty parts included. Values,
dtypes, shapes and gradients must be those of plain torch; so must those of the in-place form, and what torch refuses
must be refused with torch's kind of error before anything is sent. With `--state` results are kept in a file, and a run
that was stopped goes on. `--write` puts the table into docs/operators.md.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard
from dshard.comm import listen
from dshard.errors import DShardError
from dshard.ops.moving import leaves, replace_leaves
from dshard.ops.registry import path_of
from dshard.tables import text_table
from dshard.testing import distribute, simulated, whole

PROFILE = settings.get_current_profile_name()
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402  # loads a profile of its own

settings.load_profile(PROFILE)

MESHES = (Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y")))
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool, torch.bfloat16)
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


def check_op(op: Any, samples: int, draws: int, seed: int = 0, limit: int = 120) -> Result:
    """All that is asked of one entry of op_db."""
    result, start = Result(name_of(op)), time.perf_counter()
    draw = Random(zlib.crc32(f"{name_of(op)} {seed}".encode()))
    try:
        with time_limit(limit):
            for sample in samples_of(op, samples):
                check_sample(op, sample, draws, draw, result)
            for bad in bad_inputs_of(op)[:samples]:
                check_bad_input(op, bad, draw, result)
    except TooSlow:
        result.failures.append(f"took more than {limit} s")
    except Exception:
        result.failures.append(f"cannot be asked: {traceback.format_exc(limit=-3)}")
    result.seconds = time.perf_counter() - start
    return result


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def dtype_of(op: Any) -> torch.dtype | None:
    return next((dtype for dtype in DTYPES if dtype in op.dtypes), None)


def samples_of(op: Any, n: int) -> list[Any]:
    """At most `n` of torch's samples, spread evenly."""
    dtype = dtype_of(op)
    if dtype is None:
        return []
    gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    found = [s for s in op.sample_inputs("cpu", dtype, requires_grad=gradients) if usable(s)]
    return found[:: max(1, -(-len(found) // n))]


def usable(sample: Any) -> bool:
    tensors = tensors_of((sample.input, sample.args, sample.kwargs))
    return bool(tensors) and all(
        x.layout == torch.strided and x.device.type == "cpu" and not x.is_nested and not x.is_quantized for x in tensors
    )


def bad_inputs_of(op: Any) -> list[Any]:
    if op.error_inputs_func is None:
        return []
    return [bad for bad in op.error_inputs("cpu") if usable(bad.sample_input)]


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


@dataclass
class Case:
    """A call on one device: the arguments, exact in binary so that random terms of a pending sum lose nothing."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], sample: Any) -> Case:
        args, kwargs = replace_leaves(
            ((sample.input, *sample.args), sample.kwargs),
            lambda leaf: exact(leaf) if isinstance(leaf, Tensor) else leaf,
        )
        return cls(function, args, kwargs)

    def tensors(self) -> list[Tensor]:
        return tensors_of((self.args, self.kwargs))

    def run(self, tensors: Sequence[Tensor], wanted: Sequence[bool], weights: list[Tensor] | None) -> Outcome:
        """The outputs for these operands, and the gradients of the sum of the outputs, weighted."""
        rest = iter(tensors)
        args, kwargs = replace_leaves(
            (self.args, self.kwargs), lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf
        )
        outputs = leaves(self.function(*args, **kwargs))
        with_grad = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if not with_grad or not any(wanted):
            return Outcome(outputs, [])
        inputs = [x for x, is_wanted in zip(tensors, wanted, strict=True) if is_wanted]
        if weights is None:
            weights = [exact(torch.randn_like(out.detach())) for out in with_grad]
        else:
            weights = [
                distribute(w, Layout(out.layout.mesh, (Replicate(),) * out.layout.mesh.ndim))
                for w, out in zip(weights, with_grad, strict=True)
            ]
        grads = torch.autograd.grad(with_grad, inputs, weights, allow_unused=True)
        return Outcome(outputs, list(grads), list(weights))


@dataclass
class Outcome:
    outputs: list[Any]
    gradients: list[Tensor | None]
    weights: list[Tensor] = field(default_factory=list)


def exact(x: Tensor) -> Tensor:
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.dtype == torch.float64:
        return torch.where(x.isfinite(), (x * 2**24).round() / 2**24, x)
    if x.dtype == torch.complex128:
        return torch.view_as_complex(exact(torch.view_as_real(x)))
    return x


def check_sample(op: Any, sample: Any, draws: int, draw: Random, result: Result) -> None:
    for kind, function in (("", op.op), ("in place: ", op.inplace_variant)):
        if function is None or (kind and not (isinstance(sample.input, Tensor) and changes(function))):
            continue
        if kind and sample.broadcasts_input:
            continue
        case = Case.of(function, sample)
        differentiable = not kind and op.supports_autograd
        try:
            leafs, wanted = prepared(case, sample, differentiable)
            expected = case.run(leafs, wanted, None)
            written = [] if not kind else leafs[:1]
        except Exception:
            if not differentiable:
                continue
            try:
                leafs, wanted = prepared(case, sample, False)
                expected, written = case.run(leafs, wanted, None), []
            except Exception:
                continue
        if not kind and is_random(case, name_of(op)):
            result.random = True
        for i in range(draws):
            check_draw(case, kind, wanted, expected, written, draw, i, result)


def changes(function: Any) -> bool:
    return True


def prepared(case: Case, sample: Any, gradients: bool) -> tuple[list[Tensor], list[bool]]:
    asked = [x.requires_grad for x in tensors_of(((sample.input, *sample.args), sample.kwargs))]
    wanted = [gradients and a for a in asked]
    return [x.clone().requires_grad_(w) for x, w in zip(case.tensors(), wanted, strict=True)], wanted


class _Draws(TorchDispatchMode):
    """Notes whether an operator that ran draws random numbers, and how many were done."""

    seen = False
    done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **(kwargs or {}))
        self.done += 1
        return out


def is_random(case: Case, name: str) -> bool:
    """Whether the values of a call mean nothing: drawn, or not initialised."""
    with _Draws() as draws:
        case.run([x.clone() for x in case.tensors()], [False] * len(case.tensors()), None)
    return draws.seen or "empty" in name


def check_draw(
    case: Case,
    kind: str,
    wanted: list[bool],
    expected: Outcome,
    written: list[Tensor],
    draw: Random,
    i: int,
    result: Result,
) -> None:
    mesh = MESHES[i % len(MESHES)]
    laid = [layout_for(x, mesh, draw) for x in case.tensors()]
    described = f"{kind}{describe(case, laid)}"
    paths: set[Any] = set()
    try:
        with simulated(mesh):
            tensors = [
                distribute(x, layout, seed=n) for n, (x, layout) in enumerate(zip(case.tensors(), laid, strict=True))
            ]
            with torch.enable_grad():
                tensors = [x.requires_grad_(w) if w else x for x, w in zip(tensors, wanted, strict=True)]
            with recording(paths):
                got = case.run(tensors, wanted, expected.weights)
            gathered = [
                gather(found, "empty" in result.op) for found in (got.outputs, tensors[: len(written)], got.gradients)
            ]
        compare(expected.outputs, gathered[0], "output", result.random)
        compare(written, gathered[1], "written operand", result.random)
        if not result.random:
            compare(expected.gradients, gathered[2], "gradient", False)
    except TooSlow:
        raise
    except DShardError as error:
        note(result.refused, f"{described}: {type(error).__name__}: {error}")
    except Exception as error:
        note(result.failures, f"{described}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        result.calls += 1
        result.gradients += bool(expected.gradients)
        result.in_place += bool(kind)
    for func, path in paths:
        if path == "fallback":
            result.fallbacks = sorted({*result.fallbacks, str(func)})
        order = ("rule", "decomposition", "fallback")
        if not kind and order.index(path) > order.index(result.path):
            result.path = path


def note(notes: list[str], text: str) -> None:
    if len(notes) < MAX_FAILURES:
        notes.append(text)


def layout_for(x: Tensor, mesh: Mesh, draw: Random) -> Layout:
    sums = [Partial(), Partial(), Partial("avg"), Partial("max"), Partial("min")] if x.is_floating_point() else []
    if x.is_complex() or x.dtype in (torch.int64, torch.int32):
        sums = [Partial()]
    if sums and x.dim() <= 64 and not bool(torch.isfinite(x).all()):
        sums = [p for p in sums if p.reduce_op in ("max", "min")] if not bool(torch.isnan(x).any()) else []
    placements: list[Any] = []
    pending = draw.choice(sums) if sums else None
    for _ in mesh.shape:
        kinds = [Replicate(), *map(Shard, range(x.dim())), *map(Shard, range(x.dim()))]
        if pending is not None and draw.random() < 0.2:
            placements.append(pending)
        else:
            placements.append(draw.choice(kinds))
    return Layout(mesh, tuple(placements))


def describe(case: Case, laid: Sequence[Layout]) -> str:
    rest = iter(laid)
    args, kwargs = replace_leaves(
        (case.args, case.kwargs),
        lambda leaf: f"{tuple(leaf.shape)}[{next(rest)}]" if isinstance(leaf, Tensor) else leaf,
    )
    return f"{args} {kwargs or ''}"


@contextmanager
def recording(paths: set[Any]) -> Iterator[None]:
    """Note which operators reach distributed tensors, from outside, and by which way each goes."""
    original = DTensor.__dict__["__torch_dispatch__"]
    depth = 0

    def wrapped(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal depth
        if depth == 0:
            paths.add((func, path_of(func, args, kwargs or {})))
        depth += 1
        try:
            return original.__func__(cls, func, types, args, kwargs)
        finally:
            depth -= 1

    DTensor.__torch_dispatch__ = classmethod(wrapped)
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
            found.append(torch.empty(value.shape, dtype=value.dtype) if uninitialised else whole(value.detach()))
        else:
            found.append(value)
    return found


def compare(expected: Sequence[Any], got: Sequence[Any], what: str, shapes_only: bool) -> None:
    assert len(expected) == len(got), f"{len(got)} {what}s, not {len(expected)}"
    for right, value in zip(expected, got, strict=True):
        if not isinstance(right, Tensor):
            if value is None or isinstance(value, Tensor):
                assert right is None, f"no {what}"
                assert value is None or not bool(value.any()), f"{what} {value}, not {right}"
            elif not shapes_only:
                assert right == value or (right != right and value != value), f"{what} {value!r}, not {right!r}"
            continue
        if value is None:
            assert not bool(right.any()), f"no {what}"
            continue
        assert value.shape == right.shape, f"{what} of shape {tuple(value.shape)}, not {tuple(right.shape)}"
        assert value.dtype == right.dtype, f"{what} of {value.dtype}, not {right.dtype}"
        if not shapes_only:
            loose = {"rtol": 1e-7, "atol": 1e-7} if right.dtype in (torch.float64, torch.complex128) else {}
            torch.testing.assert_close(value, right.detach(), equal_nan=True, **loose, msg=f"{what}: {{}}".format)


def check_bad_input(op: Any, bad: Any, draw: Random, result: Result) -> None:
    """What torch refuses is refused with the same kind of error, before anything is sent.

    Not where torch itself computes before it refuses, or where it refuses the values rather than the shapes.
    """
    case = Case.of(op.op, bad.sample_input)
    copies = [x.clone() for x in case.tensors()]
    try:
        with _Draws() as before:
            case.run(copies, [False] * len(copies), None)
        return
    except Exception as error:
        kind = type(error)
    mesh = MESHES[0]
    laid = [layout_for(x, mesh, draw) for x in case.tensors()]
    described = f"bad input {describe(case, laid)}"
    sent: list[Any] = []
    try:
        with simulated(mesh):
            tensors = [
                distribute(x, layout, seed=n) for n, (x, layout) in enumerate(zip(case.tensors(), laid, strict=True))
            ]
            with listen(sent.append):
                case.run(tensors, [False] * len(tensors), None)
    except TooSlow:
        raise
    except Exception as error:
        result.bad_inputs += 1
        if not isinstance(error, kind):
            note(
                result.failures,
                f"{described}: {type(error).__name__}, not {kind.__name__}: {' '.join(str(error).split())[:200]}",
            )
        elif sent and not before.done and not by_value(case):
            note(result.failures, f"{described}: refused after {len(sent)} collectives ({kind.__name__})")
    else:
        note(result.failures, f"{described}: not refused ({kind.__name__})")


def by_value(case: Case) -> bool:
    """Whether other values in tensors of these shapes are not refused: what is in them must be read first."""
    try:
        plain = [torch.ones_like(x) if x.is_floating_point() else torch.zeros_like(x) for x in case.tensors()]
        case.run(plain, [False] * len(plain), None)
    except Exception:
        return False
    return True


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- all of them


def operators(pattern: str) -> list[Any]:
    return [op for op in op_db if re.search(pattern, name_of(op))]


def run_all(options: argparse.Namespace) -> list[Result]:
    done = read_state(options.state)
    todo = operators(options.ops)
    results = []
    for i, op in enumerate(todo):
        name = name_of(op)
        if name not in done:
            if options.state:
                write_state(options.state, {"op": name, "failures": ["the process ended"]})
            done[name] = check_op(op, options.samples, options.draws, options.seed)
            if options.state:
                write_state(options.state, asdict(done[name]))
        results.append(done[name])
        if sys.stderr.isatty():
            print(f"\r{i + 1:4}/{len(todo)} {name:60.60}", end="", file=sys.stderr, flush=True)
    return results


def read_state(path: str | None) -> dict[str, Result]:
    if path is None or not Path(path).exists():
        return {}
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {row["op"]: Result(**row) for row in rows}


def write_state(path: str, row: dict[str, Any]) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")


def write(results: Sequence[Result]) -> None:
    """Put the counts into the page about operators."""
    rows = ["| operators | count |", "|---|---|", *(f"| {meaning} | {n} |" for meaning, n in counted(results))]
    begin, end = "<!-- counts -->", "<!-- end of counts -->"
    body = "\n".join([begin, *rows, end])
    DOCS.write_text(re.sub(f"{begin}.*{end}", lambda _: body, DOCS.read_text(), flags=re.DOTALL))


def counted(results: Sequence[Result]) -> list[tuple[str, int]]:
    """How many operators are in each class, and how many calls were compared."""
    found = Counter(result.verdict for result in results)
    rows = [(meaning, found[verdict]) for verdict, meaning in CLASSES.items()]
    rows.append(("all entries of op_db", len(results)))
    rows.append(("calls compared", sum(result.calls for result in results)))
    rows.append(("of these with gradients", sum(result.gradients for result in results)))
    rows.append(("of these in place", sum(result.in_place for result in results)))
    rows.append(("refused arguments compared", sum(result.bad_inputs for result in results)))
    return rows


def table(results: Sequence[Result]) -> str:
    return text_table(["operators", "count"], [[meaning, str(n)] for meaning, n in counted(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a regular expression: only operators whose names it matches")
    parser.add_argument("--samples", type=int, default=6, help="samples of each operator")
    parser.add_argument("--draws", type=int, default=3, help="layouts of each sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", help="keep results here, and go on from them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into docs/operators.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = run_all(options)
    if options.write:
        write(results)
    if options.json:
        print(json.dumps([{**asdict(result), "verdict": result.verdict} for result in results], indent=1))
        return
    for result in results:
        for text in (*result.failures, *result.refused):
            print(f"{result.verdict:8} {result.op}: {text}")
    print(table(results))


if __name__ == "__main__":
    main()
