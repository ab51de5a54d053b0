"""Random programs over distributed tensors, of which the same lines run on one device and on ranks.

A `Program` is lines of Python over named tensors. `generated(seed)` draws one: leaves in random layouts, operators,
views, writes through chains of views, and at the end gradients of first or second order. Each line that is drawn is run
on one device at once, so that what is drawn next knows the shapes and values there are.

    python tests/helpers/generated_programs.py 20000       # seeds 0 ... 19999 on four ranks; what fails is printed
    python tests/helpers/generated_programs.py 20000 --first 5000 --simulated
    python tests/helpers/generated_programs.py --show 17          # the program of one seed
    python tests/helpers/generated_programs.py --shrink 17        # the same without the lines that it fails without
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DTensor, Mesh
from dshard.comm import bind, local_shard, plain
from dshard.errors import DShardError, RankError
from dshard.layout import parse_layout, replicated
from dshard.testing import RankPool, distribute, rank_pool, simulated, whole
from dshard.testing.pool import collectives_begun

Names: TypeAlias = dict[str, Any]

MESHES = ((4,), (2, 2), (2, 1, 2))
SIZES = (0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 7)
DEVICE = os.environ.get("DSHARD_TEST_DEVICE", "cpu")
"""Where ranks have their tensors, and one device its own: "cuda" with DSHARD_TEST_BACKEND=nccl."""
LIMIT = 60.0  # seconds for one program, on ranks that may share a loaded machine
TOLERANCE = 1e-9
ROUNDING = 1e-13  # what a sum of terms that cancel may leave of zero
DOCUMENTED: dict[str, str] = {}
"""Part of an error's message -> the words of docs/semantics.md that say so."""


@dataclass(frozen=True)
class Program:
    """Lines of Python to run `runs` times on a mesh of this shape; `loose` if something is rounded to float32."""

    mesh: tuple[int, ...]
    lines: tuple[str, ...]
    runs: int = 1
    loose: bool = False

    def __str__(self) -> str:
        return "\n".join([f"# mesh {self.mesh}, run {self.runs} times", *self.lines])


@dataclass(frozen=True)
class Result:
    """The result of a run: the tensors by name, or the error and the line that raised it."""

    names: Names
    error: BaseException | None = None
    line: str = ""

    def tensors(self) -> Names:
        values = {name: x for name, x in self.names.items() if x is None or isinstance(x, Tensor)}
        grads = {
            f"{name}.grad": x.grad for name, x in values.items() if x is not None and is_leaf(x) and x.requires_grad
        }
        return values | grads


def is_leaf(x: Tensor) -> bool:
    """Whether `x` is a leaf of autograd; False where torch raises, after writes to another view of one output."""
    try:
        return x.is_leaf
    except RuntimeError:
        return False


# -- running: one namespace for one device, one for ranks


def one_device(shift: float = 0.0, device: str = DEVICE) -> Names:
    """Return the functions that a program calls, on one device; `shift` changes all values by this fraction."""

    def leaf(shape: Sequence[int], layout: str, seed: int, grad: bool = True) -> Tensor:
        return (values(shape, seed, device) * (1 + shift)).requires_grad_(grad)

    def index(numbers: Sequence[int], layout: str) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return names_of(leaf, index, lambda x, layout: x.clone())


def on_ranks(mesh: Mesh) -> Names:
    """Return the functions that a program calls, on the ranks of `mesh`."""

    def leaf(shape: Sequence[int], layout: str, seed: int, grad: bool = True) -> Any:
        return distribute(values(shape, seed), parse_layout(layout, mesh)).requires_grad_(grad)

    def index(numbers: Sequence[int], layout: str) -> Any:
        return distribute(torch.tensor(numbers, dtype=torch.int64, device=DEVICE), parse_layout(layout, mesh))

    def moved(x: Any, layout: str) -> Any:
        return x.redistribute(placements=parse_layout(layout, mesh).placements).clone()

    return names_of(leaf, index, moved)


def names_of(leaf: Callable[..., Any], index: Callable[..., Any], moved: Callable[..., Any]) -> Names:
    return {
        "leaf": leaf,
        "index": index,
        "moved": moved,
        "torch": torch,
        "F": F,
        "grad": torch.autograd.grad,
        "no_grad": torch.no_grad,
        "checkpoint": partial(checkpoint, use_reentrant=False),
    }


@functools.lru_cache(10000)
def _values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def values(shape: Sequence[int], seed: int, device: str = DEVICE) -> Tensor:
    return _values(tuple(shape), seed).to(device, copy=True)


@functools.lru_cache(64)
def _code(lines: tuple[str, ...]) -> Any:
    return compile("\n".join(lines), "<program>", "exec")


def run(lines: tuple[str, ...], names: Names) -> Result:
    """Run the program once with the functions in `names`."""
    provided = set(names)
    try:
        exec(_code(lines), names)
    except Exception as error:
        number = next(
            (
                at.lineno
                for at in reversed(traceback.extract_tb(error.__traceback__))
                if at.filename == "<program>" and at.lineno
            ),
            1,
        )
        return Result({}, error, lines[number - 1])
    return Result({name: x for name, x in names.items() if name not in provided and name != "__builtins__"})


def is_documented(text: str) -> bool:
    """Whether the docs describe the refusal with this text."""
    docs = " ".join((Path(__file__).parents[2] / "docs" / "semantics.md").read_text().split())
    return any(part in text and documented in docs for part, documented in DOCUMENTED.items())


# -- comparing


def compare(program: Program, mesh: Mesh, at: tuple[int, ...] | None) -> tuple[str, str]:
    """Run a program on one device and on `mesh`; return the outcome as a word, and the difference."""
    with plain():
        if DEVICE != "cpu" and (refused := run(program.lines, one_device(device="cpu")).error) is not None:
            return "raised", type(refused).__name__  # a kernel that raises would end the process
        expected = run(program.lines, one_device())
    first = ("", "")
    for number in range(program.runs):
        actual = run(program.lines, on_ranks(mesh))
        if expected.error is not None or actual.error is not None:
            word, text = compare_errors(expected, actual)
        else:
            with plain():
                word, text = compare_tensors(program, expected.tensors(), actual.tensors(), at)
        if word not in ("equal", "raised"):
            text = f"in run {number + 1} of {program.runs}: {text}"
        if word not in ("equal", "raised", "wrong"):
            return word, text
        if first[0] in ("", "equal"):  # other ranks go on, so all do where values are wrong
            first = word, text
    return first


def compare_errors(expected: Result, actual: Result) -> tuple[str, str]:
    if actual.error is None:
        return "not raised", f"{expected.line!r} should raise {error_text(expected.error)}"
    if expected.error is None and "does not require grad" in str(actual.error) and has_constant_gradients(expected):
        return "equal", ""
    if expected.error is None and isinstance(actual.error, IndexError) and " with size 0" in str(actual.error):
        return (
            "raised",
            "IndexError",
        )  # an index into an empty dim, at which torch does not look where nothing is written
    if expected.error is None:
        word = "refused" if isinstance(actual.error, DShardError) else "raised only here"
        return word, f"{actual.line!r}: {error_text(actual.error)}"
    if actual.line == expected.line and isinstance(actual.error, IndexError) and "setStorage" in str(expected.error):
        return "raised", "IndexError"  # an index into an empty dim, which torch finds by the memory that it lacks
    if not isinstance(actual.error, type(expected.error)) or actual.line != expected.line:
        should, did = error_text(expected.error), error_text(actual.error)
        text = f"{expected.line!r} should raise {should}; {actual.line!r} raised {did}"
        return "refused" if isinstance(actual.error, DShardError) else "raised otherwise", text
    return "raised", type(expected.error).__name__


def has_constant_gradients(expected: Result) -> bool:
    """Whether one device recorded constant gradients, so that those of second order are zeros up to rounding."""
    second = [x for name, x in expected.tensors().items() if name.startswith("h_") or name.endswith(".grad")]
    return bool(second) and not any(x is not None and (x.abs() > ROUNDING).any() for x in second)


def error_text(error: BaseException | None) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 600 else text[:300] + " ... " + text[-300:]


def compare_tensors(program: Program, expected: Names, actual: Names, at: tuple[int, ...] | None) -> tuple[str, str]:
    shifted: Names | None = None
    wrong = []
    for name, want in expected.items():
        have = actual.get(name, "nothing of this name")
        if want is None or not isinstance(have, DTensor):
            # torch cuts the graph of a written view of nothing, which has no values but zeros
            second = name.startswith("h_") or (name.endswith(".grad") and "second" in expected)
            if want is not have and not (second and is_zero(want) and is_zero(have)):
                wrong.append(f"{name}: {have!r}, not {want!r}")
            continue
        # A gradient that is constant may be recorded here alone, or there alone, and has a gradient of zeros.
        constant = name.startswith("g_") and (have.requires_grad or is_constant(name, expected))
        facts = [(x.shape, x.dtype, x.requires_grad or constant) for x in (have, want)]
        if facts[0] != facts[1]:
            wrong.append(f"{name}: {facts[0]}, not {facts[1]}")
            continue
        far = distance(*held(have, want.detach(), at))
        scale = max(1.0, float(want.detach().abs().max()) if want.numel() and want.is_floating_point() else 1.0)
        limit = (1e-3 if program.loose else TOLERANCE) * scale
        if far <= limit:
            continue
        if shifted is None:  # what a rounding makes of these values
            shifted = run(program.lines, one_device(1e-13)).tensors()
        if want.is_floating_point() and 1e4 * distance(shifted[name].detach(), want.detach()) > far:
            continue
        wrong.append(f"{name} is off by {far:.3g} of {scale:.3g}")
    return ("wrong", "; ".join(wrong)) if wrong else ("equal", "")


def is_constant(name: str, names: Names) -> bool:
    """Whether the gradient called `name` is recorded, but has no gradient other than zeros."""
    leaves = [y for y in names.values() if isinstance(y, Tensor) and is_leaf(y) and y.requires_grad]
    try:
        x = names[name]
        assert x is not None
        grads = torch.autograd.grad(x.sum(), leaves, retain_graph=True, allow_unused=True)
    except RuntimeError:  # not recorded, or its graph is gone
        second = f"h_{name.removeprefix('g_')}"
        return second in names and is_zero(names[second])
    return not any(grad is not None and grad.any() for grad in grads)


def is_zero(x: Any) -> bool:
    """Whether `x` is zeros or None, which second gradients of independent values may be."""
    if x is None:
        return True
    return isinstance(x, Tensor) and not (x.detach().to_local() if isinstance(x, DTensor) else x.detach()).any()


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; NaNs in the same places are equal, others infinitely far."""
    if a.shape != b.shape:
        return float("inf")
    differ = ~((a == b) | (a.isnan() & b.isnan()))
    if not differ.any():
        return 0.0
    far = (a.double() - b.double()).abs()[differ].max().item()
    return far if far == far else float("inf")


def held(x: Any, value: Tensor, at: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """Return this rank's local tensor of `x` with partials reduced, and the expected one; if simulated, global ones."""
    with torch.no_grad():
        if at is None:
            return whole(x), value
        if x.layout.partial_axes():
            x = x.redistribute(placements=replicated(x.layout.mesh).placements)
        return x.to_local(), local_shard(value, x.layout.region(tuple(value.shape), at))


# -- drawing


class Drawing:
    """A program under construction, with the values of its lines on one device."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.mesh = self.random.choice(MESHES)
        self.axes = "xyz"[: len(self.mesh)]
        self.names = one_device(device="cpu")  # where an index out of bounds is an error that can be caught
        self.provided = set(self.names)
        self.lines: list[str] = []
        self.count = 0
        self.ended = False  # by a line that raises
        self.loose = False

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: x
            for name, x in self.names.items()
            if name not in self.provided and isinstance(x, Tensor) and x.is_floating_point()
        }

    def pick(self) -> tuple[str, Tensor]:
        """Draw a tensor, preferably one of the last."""
        tensors = list(self.tensors().items())
        return self.random.choice(tensors[-3:] if self.chance(0.6) else tensors)

    def pick_for(self, x: Tensor) -> tuple[str, Tensor] | None:
        """Draw a tensor that broadcasts with `x`."""
        fits = [(name, y) for name, y in self.tensors().items() if broadcasts(x.shape, y.shape)]
        return self.random.choice(fits) if fits else None

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def below(self, n: int) -> int:
        return self.random.randrange(n)

    def dim(self, x: Tensor) -> int:
        return self.random.randrange(-x.dim(), x.dim())

    def value(self) -> str:
        return self.random.choice(["2", "-0.5", "1.5", "0.7", "3"])

    def size(self) -> int:
        return self.random.choice(SIZES)

    def shape(self) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.random.choice([1, 2, 2, 2, 3, 3])))

    def layout(self, ndim: int, *, partial: bool = True, ordered: bool = False) -> str:
        choices = [f"S({dim})" for dim in range(ndim)] * 2 + ["R"] + ["P(sum)"] * partial
        if ndim and self.chance(0.15):  # one dim on all axes
            choices = [f"S({self.below(ndim)})"]
        chosen = [self.random.choice(choices) for _ in self.axes]
        text = " ".join(f"{axis}:{placement}" for axis, placement in zip(self.axes, chosen, strict=True))
        if ordered and len(chosen) > 1 and len({*chosen}) == 1 and chosen[0][0] == "S":
            return f"{text}; {chosen[0][2]}:{','.join(self.random.sample(self.axes, len(self.axes)))}"
        return text

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def add(self, line: str, *, may_raise: float = 0.0) -> bool:
        """Run a line on one device, and keep it unless it raises or its results are out of bounds."""
        try:
            exec(line, self.names)
        except Exception:
            if self.chance(may_raise):
                self.lines.append(line)
                self.ended = True
                return True
            self.again()
            return False
        for name, x in self.names.items():
            if name not in self.provided and isinstance(x, Tensor) and not in_bounds(x):
                self.again()
                return False
        self.lines.append(line)
        return True

    def again(self) -> None:
        """Run the kept lines again, which undoes the writes of a line that is left out."""
        self.names = one_device(device="cpu")  # where an index out of bounds is an error that can be caught
        exec(_code(tuple(self.lines)), self.names)

    def new(self, source: str) -> bool:
        return self.add(f"{self.name()} = {source}")

    def leaf(self, shape: Sequence[int], grad: bool) -> None:
        layout = self.layout(len(shape), ordered=True)
        self.new(f"leaf({tuple(shape)}, {layout!r}, {self.below(1000)}{'' if grad else ', False'})")

    def index(self, n: int, size: int) -> str:
        """Draw the source of a distributed tensor of `n` indices below `size`."""
        numbers = [self.below(size) for _ in range(n)]
        return f"index({numbers}, {self.layout(1, partial=False)!r})"


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def in_bounds(x: Tensor) -> bool:
    if x.numel() > 2000 or x.dim() > 5:
        return False
    return not x.is_floating_point() or not x.numel() or bool(x.detach().abs().max() < 1e3)


def away_from(x: Tensor, kink: float = 0.0) -> bool:
    """Whether no element is so near to `kink` that rounding decides on which side it lies."""
    return not x.numel() or bool((x.detach() - kink).abs().min() > 1e-6)


def listed(text: str) -> list[str]:
    """Split a text of sources that are separated by semicolons."""
    return [source.strip() for source in text.split(";") if source.strip()]


POINTWISE = listed(
    """
    {x}.sin(); {x}.tanh(); {x}.sigmoid(); {x}.square(); -{x}; {x} * {c}; {x} + {c}; {x} / 1.5; ({x} * 0.5).exp();
    F.softplus({x}); F.gelu({x}); F.silu({x}); {x}.cos(); {x}.atan(); {x}.clone(); ({x}.square() + 1).sqrt();
    ({x}.square() + 1).log(); {x}.pow(2); {x}.pow(3); 1 / ({x}.square() + 1); {x}.contiguous();
    torch.zeros_like({x}) + {x}; {x}.type_as({x}); {x}.positive(); {x} - 0; {x} * 1; {x}.exp() * 0.1; {x}.erf();
    torch.reciprocal({x}.square() + 2); {x}.add({x}, alpha=2); {x}.mul({x}); F.elu({x} - 0.01); {x}.neg();
    {x}.detach(); torch.addcmul({x}, {x}, {x}); {x}.rsub(1);
    """
)
KINKED = listed(
    """
    {x}.relu(); {x}.abs(); F.leaky_relu({x}); torch.where({x} > 0, {x}, {x} * 2); {x}.clamp(min=0);
    {x}.masked_fill({x} > 0, 0.5); {x} * ({x} > 0); {x}.sign() * {x};
    """
)
BINARY = listed(
    """
    {x} + {y}; {x} * {y}; {x} - {y}; {x} / ({y}.square() + 1); torch.lerp({x}, {y}, 0.3);
    torch.add({x}, {y}, alpha=0.5); F.mse_loss({x}, {y}.expand_as({x})); torch.atan2({x}, {y}.square() + 1);
    torch.addcmul({x}, {x}, {y}, value=0.5); {x}.addcdiv({y}, {y}.square() + 1); torch.hypot({x}, {y}.square() + 1);
    {x} @ {y}.mT; {y} * {x};
    """
)
REDUCED = listed(
    """
    {x}.sum(); {x}.mean(); {x}.sum({d}); {x}.mean({d}); {x}.sum({d}, keepdim=True); {x}.mean({d}, keepdim=True);
    {x}.square().sum().sqrt(); torch.linalg.vector_norm({x}); {x}.logsumexp({d}); {x}.var({d}); {x}.amax({d});
    {x}.max(); {x}.cumsum({d}); {x}.norm(); {x}.std(); {x}.prod({d}); {x}.max({d})[0]; {x}.sum(({d}, {e}));
    {x}.topk(1, {d})[0]; {x}.sort({d})[0]; torch.var_mean({x}, {d})[0]; {x}.min(); {x}.nansum({d});
    """
)
ALONG = listed(
    """
    {x}.softmax({d}); {x}.log_softmax({d}); F.layer_norm({x}, {x}.shape[-1:]); F.normalize({x}, dim={d});
    {x}.roll(1, {d}); {x}.roll(-2, {d}); {x}.flip({d}); F.rms_norm({x}, {x}.shape[-1:]);
    torch.stack([{x}, {x} * 2], {d}); torch.cat([{x}, {x}], {d}); {x}.repeat_interleave(2, {d}); F.pad({x}, (1, 0));
    torch.diff({x}, dim={d}); {x}.tril(); F.glu({x}, {d}); {x}.triu(1); F.softmin({x}, {d});
    {x}.roll({x}.shape[{d}], {d}); F.pad({x}, (0, 0)); {x}.trace(); {x}.outer({x});
    """
)


def pointwise(d: Drawing) -> bool:
    x, _ = d.pick()
    return d.new(d.random.choice(POINTWISE).format(x=x, c=d.value()))


def kinked(d: Drawing) -> bool:
    name, x = d.pick()
    return away_from(x) and d.new(d.random.choice(KINKED).format(x=name))


def binary(d: Drawing) -> bool:
    name, x = d.pick()
    other = d.pick_for(x)
    return other is not None and d.new(d.random.choice(BINARY).format(x=name, y=other[0]))


def fresh(x: Tensor) -> bool:
    """Whether no two elements are so near that rounding decides which is larger."""
    flat = x.detach().flatten().sort()[0]
    return flat.numel() < 2 or bool((flat[1:] - flat[:-1]).min() > 1e-6)


def reduced(d: Drawing) -> bool:
    name, x = d.pick()
    source = d.random.choice(REDUCED)
    if x.dim() == 0 or (re.search("max|min|topk|sort", source) and not fresh(x)):
        return False
    if re.search("sqrt|norm|std", source) and x.numel() < 2:
        return False
    return d.new(source.format(x=name, d=d.dim(x), e=d.dim(x)))


def along(d: Drawing) -> bool:
    name, x = d.pick()
    source = d.random.choice(ALONG)
    if x.dim() == 0 or ("norm" in source and x.shape[-1] < 2):
        return False
    return d.new(source.format(x=name, d=d.dim(x)))


def product(d: Drawing) -> bool:
    name, x = d.pick()
    if x.dim() == 0:
        return False
    k, n = x.shape[-1], d.size()
    partners = [other for other, y in d.tensors().items() if y.dim() == 2 and y.shape[0] == k]
    if not partners or d.chance(0.5):
        d.leaf((k, n), d.chance(0.7))
        partners = d.lines[-1].split()[:1]
    w = d.random.choice(partners)
    n = d.names[w].shape[1]
    sources = [
        "{x} @ {w}",
        "F.linear({x}, {w}.t())",
        "torch.matmul({x}, {w})",
        "torch.einsum('...k,kn->...n', {x}, {w})",
    ]
    if x.dim() == 2:
        sources += [
            "{x}.mm({w})",
            "({w}.t() @ {x}.t())",
            "{x} @ {x}.t()",
            "{x}.t() @ {x}",
            "torch.einsum('ik,jk->ij', {x}, {w}.t())",
            "torch.addmm({x}[:, :1], {x}, {w})",
            "{x}[0] @ {w}",
            "{x} @ {w}[:, 0]",
        ]
    if x.dim() == 3:
        sources += [
            "torch.bmm({x}, {x}.mT)",
            "{x} @ {x}.transpose(-1, -2)",
            "torch.einsum('bik,bjk->bij', {x}, {x})",
            "torch.baddbmm({x}[:, :, :1], {x}, {w}.expand({x}.shape[0], -1, -1))",
        ]
    if x.dim() == 1:
        sources += ["{x}.dot({x})", "{w}.t().mv({x})"]
    return d.new(d.random.choice(sources).format(x=name, w=w))


def indexed(d: Drawing) -> bool:
    name, x = d.pick()
    if x.dim() == 0:
        return False
    dim = d.dim(x)
    size = x.shape[dim]
    if not size:
        return False
    index = d.index(d.random.choice([1, 2, 3, 5]), size)
    sources = [f"{name}.index_select({dim}, {index})"]
    if x.dim() == 2 and x.numel():
        rows = d.index(x.shape[0], x.shape[1])
        sources += [
            f"F.embedding({d.index(4, x.shape[0])}, {name})",
            f"F.cross_entropy({name}, {rows})",
            f"{name}.gather(1, {rows}[:, None])",
        ]
    if dim in (0, -x.dim()):
        sources.append(f"{name}[{index}]")
    return d.new(d.random.choice(sources))


def joined(d: Drawing) -> bool:
    name, x = d.pick()
    alike = [other for other, y in d.tensors().items() if y.shape == x.shape]
    if x.dim() == 0:
        return d.new(f"torch.stack([{name}, {d.random.choice(alike)}])")
    dim = d.dim(x)
    other = d.random.choice(alike)
    return d.new(d.random.choice([f"torch.cat([{name}, {other}], {dim})", f"torch.stack([{other}, {name}], {dim})"]))


def view_of(d: Drawing, x: Tensor) -> str:
    """Draw the source of a view of `x`, such as `.t()`; torch may refuse it."""
    if x.dim() == 0:
        return d.random.choice([".view(1)", ".unsqueeze(0)", "[None]", ".expand(3)", ".reshape(-1)"])
    dim, other, size = d.dim(x), d.dim(x), x.shape[d.dim(x)]
    size = x.shape[dim]
    start = d.below(size + 1)
    length = d.below(size - start + 1)
    dims = list(range(x.dim()))
    d.random.shuffle(dims)
    turned = [".t()"] if x.dim() <= 2 else []
    turned += [".mT", ".T"] if x.dim() == 2 else [".mT"] if x.dim() > 2 else []
    sources = [
        f".transpose({dim}, {other})",
        f".permute({dims})",
        f".narrow({dim}, {start}, {length})",
        f".narrow({dim}, 0, {size})",
        f"[{':, ' * (dim % x.dim())}{start}:{start + length}]",
        f"[{':, ' * (dim % x.dim())}::{d.below(3) + 1}]",
        f".unsqueeze({dim})",
        ".squeeze()",
        f".squeeze({dim})",
        ".view(-1)",
        ".flatten()",
        ".reshape(-1)",
        f".unflatten({dim}, (-1, {d.random.choice([1, 2, 3])}))",
        f".swapaxes({dim}, {other})",
        f".movedim({dim}, {other})",
        f".view({list(x.shape)})",
        f".reshape({factors(d, x.numel())})",
        f".view({factors(d, x.numel())})",
        "[:]",
        "[...]",
        f".expand({[-1] * x.dim()})",
        ".view_as({})".format("torch.empty(0)") if d.chance(0) else "[None]",
        f"[..., {start}:]",
        f".expand(2, {', '.join(['-1'] * x.dim())})" if d.chance(0.3) else "[:]",
        f".split({max(1, length)}, {dim})[0]",
        f".split({max(1, size)}, {dim})[0]",
        f".chunk(2, {dim})[-1]",
        f".chunk(1, {dim})[0]",
        f".unfold({dim}, {max(1, length)}, 1)" if d.chance(0.3) else "[:]",
    ]
    if size:
        i = d.below(size)
        sources += [f".select({dim}, {i})", f"[{i - size}]", f".unbind({dim})[{i}]", f"[{i}]"]
    if x.dim() >= 2:
        sources += [".diagonal()", f".diagonal({d.below(3) - 1}, {dim}, {other})", ".flatten(0, 1)"]
    return d.random.choice(turned * 4 + sources)


def factors(d: Drawing, n: int) -> list[int]:
    sizes = [k for k in range(1, n + 1) if n % k == 0] or [0]
    first = d.random.choice(sizes)
    return [first, n // first] if first else [0, d.size()]


def viewed(d: Drawing, most: int) -> tuple[str, Tensor]:
    """Draw a chain of views of some tensor; return its source and its value."""
    source, x = d.pick()
    for _ in range(d.below(most + 1)):
        view = view_of(d, x)
        with suppress(Exception):
            with torch.no_grad():
                x = eval(f"x{view}", {"x": x, "torch": torch})
            source += view
    return source, x


def view(d: Drawing) -> bool:
    source, _ = viewed(d, 3)
    return ("." in source or "[" in source) and d.new(source)


WRITES = listed(
    """
    .mul_({c}); .add_({c}); .sin_(); .tanh_(); .sigmoid_(); .zero_(); .fill_(0.3); .neg_(); .mul_({y}); .add_({y});
    .copy_({y}); .sub_({y}, alpha=0.5); .div_(1.5); .square_(); .lerp_({y}, 0.3); .addcmul_({y}, {y}); .pow_(2);
    .clamp_(-0.7, 0.8); .exp_().mul_(0.1); .cos_(); .masked_fill_({x} > 0.2, 0.3); .atan_(); .cumsum_(-1); .tril_();
    """
)
WRITES_KINKED = listed(
    """
    .relu_(); .abs_(); .clamp_(min=0); .masked_fill_({x} > 0, 0.3);
    """
)
SET = listed(
    """
    [0] = {c}; [:, 1:] = {c}; [...] = {y}; [-1:] = {c}; [:] = {y}; [..., 0] = {c}; [{x} > 0.2] = {c};  *= {y};
    += {c}; [0] *= {c}; [..., 1:] += {y}[..., 1:]; [1:] = {y}[1:];  -= {y}; [::2] = {c};  /= 1.5;
    """
)


def overlaps(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def has_windows(x: Tensor) -> bool:
    """Whether entries share memory, as overlapping windows of `unfold` do, which torch writes in order."""
    numbers = torch.arange(x.untyped_storage().nbytes() // x.itemsize)
    held = numbers.as_strided(x.shape, x.stride(), x.storage_offset())
    return len(held.unique()) < x.numel() and not overlaps(x)


def is_same_memory_otherwise(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share memory with different strides."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x.stride() != y.stride()


def write(d: Drawing) -> bool:
    """Add a write through a chain of views, sometimes unrecorded or forbidden."""
    source, x = viewed(d, 3)
    if has_windows(x):
        return False  # what comes out depends on the order
    other = d.pick_for(x)
    if other is not None and is_same_memory_otherwise(other[1], x):
        return False  # torch may read what it has just written
    y = d.value() if other is None or d.chance(0.1) else other[0]
    action = d.random.choice(WRITES * 2 + SET + WRITES_KINKED * away_from(x))
    line = f"{source} {action}" if action[1] == "=" else source + action
    if re.search("masked_fill_|\\[{x}", line) and overlaps(x):
        return False  # which torch is about to forbid
    if x.dim() and x.shape[0] and not overlaps(x) and d.chance(0.15):
        dim = d.dim(x)
        index = d.index(2, max(1, x.shape[dim]))
        like = f"{source}.index_select({dim}, {index})"
        line = source + d.random.choice([f".index_fill_({dim}, {index}, 0.3)", f".index_add_({dim}, {index}, {like})"])
    text = line.format(c=d.value(), y=y, x=source)
    if d.chance(0.15):
        text = f"with no_grad(): {text}"
    if re.search(r"^\w+ [-+*/]?= ", text):
        return False  # an assignment
    return d.add(text, may_raise=0.05)


def other(d: Drawing) -> bool:
    """Add a redistribution, recomputation, hook, cast or the like."""
    name, x = d.pick()
    y = d.pick_for(x)
    sources = [f"moved({name}, {d.layout(x.dim())!r})"] * 6
    body = d.random.choice(
        ["(x * x).sin()", "x.tanh() * 2", "x.square().sum()", "(x @ x.mT).tanh()", "x.softmax(-1)", "x.flatten().sin()"]
    )
    sources += [f"checkpoint(lambda x: {body}, {name})"] * 3
    if y is not None:
        sources += [f"checkpoint(lambda x, y: (x * y).tanh() + x, {name}, {y[0]})"] * 2
    sources += [f"{name}.float().double()", f"{name}.to(torch.float32).sin().to(torch.float64)"]
    hookable = x.requires_grad and not x._is_view()  # torch crashes on views that were written to
    # A second gradient passes the hooks of a product as the formula has it.
    if hookable and "prod" not in type(x.grad_fn).__name__.lower() and d.chance(0.3):
        return d.add(f"{name}.register_hook(lambda g: g * {d.value()})")
    if x.requires_grad and not is_leaf(x) and d.chance(0.2):
        return d.add(f"{name}.retain_grad()")
    source = d.random.choice(sources)
    done = d.new(source)
    d.loose |= (done and "float32" in source) or ".float()" in source
    return done


STEPS: list[tuple[Callable[[Drawing], bool], int]] = [
    (pointwise, 5),
    (kinked, 1),
    (binary, 4),
    (reduced, 2),
    (along, 3),
    (product, 4),
    (indexed, 2),
    (joined, 1),
    (view, 4),
    (write, 6),
    (other, 3),
]


def scalar_of(d: Drawing, name: str) -> str:
    return d.random.choice(
        [
            f"{name}.sum()",
            f"{name}.sin().sum()",
            f"{name}.square().sum()",
            f"({name} * 0.7).tanh().sum()",
            f"({name} * {name}).sum()",
            f"{name}.sum().sin()",
            f"{name}.sigmoid().sum().pow(2)",
        ]
    )


def summed(d: Drawing, name: str, of: Sequence[str]) -> bool:
    """Add lines that sum some tensors to a scalar."""
    for i, each in enumerate(of):
        if not d.add(f"{name} = {f'{name} + ' * bool(i)}{scalar_of(d, each)}") and not i:
            return False
    return True


def trained_on(d: Drawing, leaves: Sequence[str]) -> None:
    """Add an optimiser's step, and a backward pass that accumulates into the present gradients."""
    for name in leaves:
        if d.names[name].grad is not None:
            d.add(f"with no_grad(): {name}.sub_({name}.grad, alpha=0.1)")
    if summed(d, "loss", leaves[:2]):
        d.add("loss.backward()", may_raise=1.0)


def differentiated(d: Drawing) -> None:
    """Add the end of a program: gradients of first or second order."""
    tensors = {name: x for name, x in d.tensors().items() if x.requires_grad}
    leaves = [name for name, x in tensors.items() if is_leaf(x)]
    ends = [name for name, x in tensors.items() if not is_leaf(x)]
    if not ends:
        return
    of = sorted({ends[-1], *d.random.sample(ends, min(len(ends), d.below(3)))})
    if not summed(d, "loss", of):
        return
    if d.chance(0.35):
        d.add("loss.backward()", may_raise=1.0)
        if not d.ended and d.chance(0.1):
            d.add("loss.backward()", may_raise=0.3)
        elif not d.ended and d.chance(0.3):
            trained_on(d, leaves)
        return
    sources = leaves + ([d.random.choice(ends)] if d.chance(0.2) else [])
    of, options = "loss", "create_graph=True, allow_unused=True"
    if d.chance(0.2):  # of a tensor, with a gradient that comes in
        of = d.random.choice(ends)
        like = d.random.choice([of, f"{of}.detach()", f"torch.ones_like({of})"])
        options = f"{like}, {options}"
    line = f"grads = grad({of}, [{', '.join(sources)}], {options})"
    if not d.add(line, may_raise=1.0) or d.ended:
        return
    used = []
    for i, (name, g) in enumerate(zip(sources, d.names["grads"], strict=True)):
        d.add(f"g_{name} = grads[{i}]")
        if g is not None and g.requires_grad:
            used.append(f"g_{name}")
    if not used or d.chance(0.1):
        return
    if not summed(d, "second", d.random.sample(used, min(len(used), 1 + d.below(3)))):
        return
    if d.chance(0.4):
        d.add("second.backward()", may_raise=1.0)
    elif d.add(f"grads = grad(second, [{', '.join(leaves)}], allow_unused=True)", may_raise=1.0) and not d.ended:
        for i, name in enumerate(leaves):
            d.add(f"h_{name} = grads[{i}]")


def generated(seed: int) -> Program:
    """Generate the program of this seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        d = Drawing(seed)
        recorded = d.chance(0.9)
        for _ in range(d.random.choice([1, 1, 2, 2, 3])):
            d.leaf(d.shape(), recorded and d.chance(0.8))
        steps, weights = zip(*STEPS, strict=True)
        for _ in range(d.random.choice([2, 3, 4, 5, 6, 8])):
            for _ in range(4):  # what does not fit is drawn again
                if d.random.choices(steps, weights)[0](d) or d.ended:
                    break
            if d.ended:
                break
        if not d.ended:
            differentiated(d)
        return Program(d.mesh, tuple(d.lines), d.random.choice([1, 1, 2, 3]), d.loose)


# -- on ranks


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> tuple[Mesh, tuple[int, ...]]:
    """Return the mesh of this shape over all ranks, and this rank's coordinate."""
    mesh = bind(dshard.init_device_mesh(DEVICE, shape, mesh_dim_names=tuple("xyz"[: len(shape)])))
    return mesh, mesh.coordinate(dist.get_rank())


Outcome: TypeAlias = tuple[str, str]


def on_this_rank(programs: Sequence[Program] | range, path: str) -> None:
    """Run programs (or those of these seeds) on this rank, and write each outcome as a line to this rank's file.

    Ends before its time where ranks do not agree: they may be out of step.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    with open(f"{path}.{rank}", "a") as file, open(f"{path}.{rank}.stack", "w") as stack:
        for number, (each, program) in enumerate(zip(programs, drawn(programs, rank), strict=True)):
            mesh, at = mesh_of(program.mesh)
            limit = LIMIT if number else 4 * LIMIT  # the first one loads and builds what all need
            faulthandler.dump_traceback_later(limit, exit=True, file=stack)
            try:
                word, text = compare(program, mesh, at)
            except Exception as error:
                word, text = "raised only here", f"comparing: {error_text(error)}"
            alike = agreed(word)
            faulthandler.cancel_dump_traceback_later()
            file.write(json.dumps([each if isinstance(each, int) else number, word, text]) + "\n")
            file.flush()
            if not alike:
                return


def drawn(programs: Sequence[Program] | range, rank: int) -> list[Program]:
    """Return the programs; from seeds, each rank generates a share of them."""
    if not isinstance(programs, range):
        return list(programs)
    ranks = dist.get_world_size()
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, [generated(seed) for seed in programs[rank::ranks]])
    return [shares[i % ranks][i // ranks] for i in range(len(programs))]


WORDS = ("equal", "wrong", "raised", "refused", "not raised", "raised otherwise", "raised only here")


def agreed(word: str) -> bool:
    """Whether all ranks have this outcome, up to wrong values, and have begun equally many collectives."""
    extremes = torch.tensor([WORDS.index(word), -WORDS.index(word)], device=DEVICE)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    most, least = WORDS[extremes[0]], WORDS[-extremes[1]]
    if most in ("equal", "wrong"):
        return True
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, collectives_begun())
    begun = {pair for count in counts for pair in count.items()}
    return most == least and len(begun) == len({group for group, _ in begun})


def outcomes(pool: RankPool, programs: Sequence[Program] | range, each: int = 100) -> Iterator[tuple[int, str, str]]:
    """Run programs on four ranks; yield for each its number or seed, the outcome as a word, and details."""
    done = 0
    while done < len(programs):
        some = programs[done : done + each]
        with tempfile.TemporaryDirectory(prefix="dshard-programs-") as directory:
            path = os.path.join(directory, "outcomes")
            failure = ""
            try:
                pool.run(on_this_rank, some, path, timeout=LIMIT * len(some) + 60)
            except RankError as error:
                failure = str(error)
            ranks = [[json.loads(line) for line in text_of(f"{path}.{r}").splitlines()] for r in range(pool.n_ranks)]
            stacks = [text_of(f"{path}.{r}.stack") for r in range(pool.n_ranks)]
        complete = min(map(len, ranks))
        for of_ranks in zip(*(rank[:complete] for rank in ranks), strict=True):
            yield combined(of_ranks)
        if complete < len(some) and failure:
            number = some[complete] if isinstance(some, range) else complete
            places = [place_in(stack) for stack in stacks]
            yield number, "hung" if any(places) else "aborted", f"{failure[:300]}; {places}"
            complete += 1
        elif complete < len(some):
            pool.close()  # they may be out of step
        done += complete


def place_in(stack: str) -> str:
    """Return the lines at which a rank hung, from its stack, innermost first."""
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\w+)', stack.rpartition("Thread ")[2])
    lines = [
        f"{Path(file).name}:{line} {name}" for file, line, name in frames if "dshard" in file or file == "<program>"
    ]
    return " < ".join(lines[:4])


def text_of(path: str) -> str:
    return Path(path).read_text() if os.path.exists(path) else ""


def combined(of_ranks: Sequence[tuple[int, str, str]]) -> tuple[int, str, str]:
    """Combine the outcomes of all ranks into one: the worst, or that ranks differ."""
    number = of_ranks[0][0]
    words = [word for _, word, _ in of_ranks]
    worst = max(words, key=WORDS.index)
    text = next(text for _, word, text in of_ranks if word == worst)
    if len(set(words)) > 1 and set(words) != {"equal", "wrong"}:
        return number, "ranks differ", f"{words}: {text}"
    return number, worst, text


def simulated_outcome(program: Program) -> tuple[str, str]:
    """Return the outcome of a program on simulated ranks."""
    mesh = Mesh(program.mesh, tuple("xyz"[: len(program.mesh)]))
    with simulated(mesh):
        try:
            return compare(program, mesh, None)
        except Exception as error:
            return "raised only here", f"comparing: {error_text(error)}"


# -- shrinking


def shorter(program: Program) -> Iterator[Program]:
    """Yield programs with fewer or simpler lines that end on one device as this one does."""
    expected = run(program.lines, one_device())
    yielded = set()
    for i, line in enumerate(program.lines):
        for lines in (without(program.lines, i), *plainer(program.lines, i, line)):
            ended = run(lines, one_device())
            if (
                lines in yielded
                or isinstance(ended.error, NameError | SyntaxError)
                or type(ended.error) is not type(expected.error)
            ):
                continue
            yielded.add(lines)
            yield replace(program, lines=lines)
    if program.runs > 1:
        yield replace(program, runs=1)
    if len(program.mesh) > 1 and not any("y:" in line for line in program.lines):
        return


def without(lines: tuple[str, ...], i: int) -> tuple[str, ...]:
    """Return the lines without line `i` and without those that depend on it."""
    gone = set(re.findall(r"^(\w+) = ", lines[i]))
    kept = list(lines[:i])
    for line in lines[i + 1 :]:
        if gone & set(re.findall(r"\w+", line)) and not (set(gone) & {"loss", "second", "grads"}):
            gone |= set(re.findall(r"^(\w+) = ", line)) - {"loss", "second", "grads"}
            continue
        kept.append(line)
    return tuple(kept)


def plainer(lines: tuple[str, ...], i: int, line: str) -> Iterator[tuple[str, ...]]:
    """Yield the program with a simpler line `i`: fewer terms, one view less, or another layout."""
    head, equals, source = line.partition(" = ")
    options = []
    if equals and not source.startswith(("leaf", "grad")):
        options += [f"{head} = {name} * 1" for name in set(re.findall(r"\bt\d+\b", source))]
        options.append(re.sub(r"\w+ \+ ", "", line))
    for match in re.finditer(r"\.\w+\([^()]*\)(\[-?\d+\])?|\[[^\[\]]*\]|\.mT|\.T", line):
        options.append(line[: match.start()] + line[match.end() :])
    for match in re.finditer(r"[xyz]:(S\(\d\)|P\(sum\))", line):
        options.append(line[: match.start(1)] + "R" + line[match.end(1) :])
    options += [line.replace("P(sum)", "R"), re.sub(r"^with no_grad\(\): ", "", line)]
    for option in options:
        if option != line:
            yield (*lines[:i], option, *lines[i + 1 :])


def shrunk(program: Program, pool: RankPool, word: str, like: str = "") -> Program:
    """Shrink a program to a shorter one with the outcome `word`."""
    while True:
        options = list(shorter(program))
        for number, seen, text in outcomes(pool, options):
            if seen == word and like in text:
                program = options[number]
                break
        else:
            return program


# -- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="on simulated ranks too, and say where they differ")
    parser.add_argument("--show", type=int)
    parser.add_argument("--shrink", type=int)
    parser.add_argument("--log", help="append outcomes other than equal to this file, as lines of JSON")
    args = parser.parse_args()
    if args.show is not None:
        print(generated(args.show))
        return
    if args.shrink is not None:
        program = generated(args.shrink)
        (_, word, text), *_ = outcomes(rank_pool(4), [program])
        print(word, text, program, sep="\n")
        small = shrunk(program, rank_pool(4), word)
        print("\n# shrunk", small, list(outcomes(rank_pool(4), [small])), sep="\n")
        return
    seeds, start = range(args.first, args.first + args.count), time.perf_counter()
    words: Counter[str] = Counter()
    for number, (seed, word, text) in enumerate(outcomes(rank_pool(4), seeds), 1):
        words[word] += 1
        if args.simulated:
            other, why = simulated_outcome(generated(seed))
            if other != word:
                words[f"simulated: {other}, real: {word}"] += 1
                text += f"; simulated: {other} {why}"
        if args.log and word not in ("equal", "raised"):
            with open(args.log, "a") as file:
                file.write(json.dumps([seed, word, text]) + "\n")
        elif word not in ("equal", "raised"):
            print(f"seed {seed}: {word}: {text}", flush=True)
        if number % 100 == 0:
            print(f"{number} programs in {time.perf_counter() - start:.0f} s: {dict(words)}", flush=True)
    print(f"{sum(words.values())} programs in {time.perf_counter() - start:.0f} s: {dict(words)}")


if __name__ == "__main__":
    main()
