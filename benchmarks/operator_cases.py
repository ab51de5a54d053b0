"""Torch's own list of operators and samples (`op_db`): calls on tensors laid out at random, and what one device gives.

`coverage.py` runs them on dshard, `coverage_torch.py` on torch's DTensor: the same calls, layouts and terms of partial
reductions.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import torch
from hypothesis import settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import Layout, Mesh, Partial, Replicate, Shard
from dshard.core.trees import leaves, replace_leaves

PROFILE = settings.get_current_profile_name()
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402  # loads a profile of its own

settings.load_profile(PROFILE)

MESHES = {(4,): ("x",), (2, 2): ("x", "y")}
"""Shapes of meshes, and the names of their axes."""
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool, torch.bfloat16)
Lay: TypeAlias = Callable[[Tensor, Any], Tensor]


def operators(pattern: str) -> list[Any]:
    """The entries of op_db whose names match."""
    return [op for op in op_db if re.search(pattern, name_of(op))]


def meshes(device: str) -> list[Mesh]:
    """The meshes on which operators run."""
    return [Mesh(shape, names, device_type=device) for shape, names in MESHES.items()]


def name_of(op: Any) -> str:
    """The operator, with the variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples_of(op: Any, n: int, device: str = "cpu") -> list[Any]:
    """At most `n` of torch's samples, spread evenly."""
    dtype = next((dtype for dtype in DTYPES if dtype in op.supported_dtypes(device)), None)
    if dtype is None or n == 0:
        return []
    gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    found = [s for s in op.sample_inputs(device, dtype, requires_grad=gradients) if usable(s, device)]
    return found[:: max(1, -(-len(found) // n))]


def bad_inputs_of(op: Any, device: str = "cpu") -> list[Any]:
    """The arguments that torch refuses by its own list."""
    if op.error_inputs_func is None:
        return []
    torch.manual_seed(0)
    return [bad for bad in op.error_inputs(device) if usable(bad.sample_input, device)]


def usable(sample: Any, device: str) -> bool:
    """Whether all tensors are strided ones on devices of this type, and there is one."""
    tensors = tensors_of((sample.input, sample.args, sample.kwargs))
    return bool(tensors) and all(
        x.layout == torch.strided and x.device.type == device and not x.is_nested and not x.is_quantized
        for x in tensors
    )


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested arguments, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


@dataclass
class Outcome:
    """What a call gives: outputs, gradients of the inputs that have one, and the weights of the outputs in the sum."""

    outputs: list[Any]
    gradients: list[Tensor | None]
    weights: list[Tensor] = field(default_factory=list)


@dataclass
class Case:
    """A call on one device: the arguments, exact in binary so that random terms of a partial sum lose nothing."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], sample: Any) -> Case:
        """The call of `function` on a sample."""
        args, kwargs = replace_leaves(
            ((sample.input, *sample.args), sample.kwargs),
            lambda leaf: exact(leaf) if isinstance(leaf, Tensor) else leaf,
        )
        return cls(function, args, kwargs)

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_of((self.args, self.kwargs))

    def called(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The outputs for these operands."""
        rest = iter(tensors)
        args, kwargs = replace_leaves(
            (self.args, self.kwargs), lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf
        )
        return leaves(self.function(*args, **kwargs))

    def run(self, tensors: Sequence[Tensor], wanted: Sequence[bool], weights: list[Tensor] | None, lay: Lay) -> Outcome:
        """The outputs, and the gradients of the sum of the outputs, weighted; weights are laid out by `lay`."""
        outputs = self.called(tensors)
        return Outcome(outputs, *gradients(outputs, tensors, wanted, weights, lay))


def gradients(
    outputs: list[Any], tensors: Sequence[Tensor], wanted: Sequence[bool], weights: list[Tensor] | None, lay: Lay
) -> tuple[list[Tensor | None], list[Tensor]]:
    """The gradients of the sum of the outputs, weighted, in the operands for which they are wanted; the weights."""
    with_grad = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if not with_grad or not any(wanted):
        return [], []
    inputs = [x for x, is_wanted in zip(tensors, wanted, strict=True) if is_wanted]
    if weights is None:
        weights = [exact(torch.randn_like(out.detach())) for out in with_grad]
    laid = [lay(w, out) for w, out in zip(weights, with_grad, strict=True)]
    return list(torch.autograd.grad(with_grad, inputs, laid, allow_unused=True)), weights


def as_is(weight: Tensor, out: Any) -> Tensor:
    """Weights on one device."""
    return weight


def exact(x: Tensor) -> Tensor:
    """A copy, rounded to 24 binary places where that is fewer than the dtype has."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.dtype == torch.float64:
        return torch.where(x.isfinite(), (x * 2**24).round() / 2**24, x)
    if x.dtype == torch.complex128:
        return torch.view_as_complex(exact(torch.view_as_real(x)))
    return x


# -- trials


@dataclass
class Trial:
    """A call whose operands are laid out so, and what one device gives.

    `written` is what an in-place operator leaves in its operand; of what is drawn at random or not initialised only
    shapes and dtypes mean anything.
    """

    case: Case
    in_place: bool
    wanted: list[bool]
    expected: Outcome
    written: list[Tensor]
    random: bool
    layouts: list[Layout]

    @property
    def mesh(self) -> Mesh:
        """The mesh that all operands lie on."""
        return self.layouts[0].mesh

    def __str__(self) -> str:
        return f"{'in place: ' * self.in_place}{described(self.case, self.layouts)}"


def trials(op: Any, samples: int, draws: int, seed: int = 0, device: str = "cpu") -> Iterator[Trial]:
    """Each sample in `draws` choices of layouts, the meshes taking turns; then the in-place form, if there is one."""
    draw = Random(zlib.crc32(f"{name_of(op)} {seed}".encode()))
    for sample in samples_of(op, samples, device):
        for in_place, function in ((False, op.op), (True, op.inplace_variant)):
            if function is None or (in_place and (sample.broadcasts_input or not isinstance(sample.input, Tensor))):
                continue
            case = Case.of(function, sample)
            found = _on_one_device(case, sample, in_place, op.supports_autograd and not in_place)
            if found is None:
                continue
            is_random = _is_random(case, name_of(op))
            for i in range(draws):
                mesh = meshes(device)[i % len(MESHES)]
                laid = [layout_for(x, mesh, draw) for x in case.tensors()]
                yield Trial(case, in_place, *found, is_random, laid)


def _on_one_device(
    case: Case, sample: Any, in_place: bool, differentiable: bool
) -> tuple[list[bool], Outcome, list[Tensor]] | None:
    """Which gradients are wanted, what comes out and what is written; None where plain torch refuses the sample."""
    recorded = [x.requires_grad for x in tensors_of(((sample.input, *sample.args), sample.kwargs))]
    for gradients_too in dict.fromkeys((differentiable, False)):
        wanted = [gradients_too and a for a in recorded]
        leafs = [x.clone().requires_grad_(w) for x, w in zip(case.tensors(), wanted, strict=True)]
        try:
            expected = case.run(leafs, wanted, None, as_is)
        except Exception:
            continue
        return wanted, expected, leafs[:1] if in_place else []
    return None


class Draws(TorchDispatchMode):
    """Notes whether an operator that ran draws random numbers, and how many were done."""

    seen = False
    done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **(kwargs or {}))
        self.done += 1
        return out


def _is_random(case: Case, name: str) -> bool:
    """Whether the values of a call mean nothing: drawn, or not initialised."""
    with Draws() as draws:
        case.called([x.clone() for x in case.tensors()])
    return draws.seen or "empty" in name


def layout_for(x: Tensor, mesh: Mesh, draw: Random) -> Layout:
    """A layout drawn at random: on each axis partial with one chance in five where the dtype has a reduction, else
    whole or split, each dim of the tensor being twice as likely as whole."""
    sums = [Partial(), Partial(), Partial("avg"), Partial("max"), Partial("min")] if x.is_floating_point() else []
    if x.is_complex() or x.dtype in (torch.int64, torch.int32):
        sums = [Partial()]
    if sums and x.dim() <= 64 and not bool(torch.isfinite(x).all()):
        sums = [p for p in sums if p.reduce_op in ("max", "min")] if not bool(torch.isnan(x).any()) else []
    placements: list[Any] = []
    reduction = draw.choice(sums) if sums else None
    for _ in mesh.shape:
        kinds = [Replicate(), *map(Shard, range(x.dim())), *map(Shard, range(x.dim()))]
        if reduction is not None and draw.random() < 0.2:
            placements.append(reduction)
        else:
            placements.append(draw.choice(kinds))
    return Layout(mesh, tuple(placements))


def described(case: Case, laid: Sequence[Layout]) -> str:
    """The arguments, the layout of each tensor beside its shape."""
    rest = iter(laid)
    args, kwargs = replace_leaves(
        (case.args, case.kwargs),
        lambda leaf: f"{tuple(leaf.shape)}[{next(rest)}]" if isinstance(leaf, Tensor) else leaf,
    )
    return f"{args} {kwargs or ''}"


def compare(expected: Sequence[Any], got: Sequence[Any], what: str, shapes_only: bool) -> None:
    """Raise an AssertionError where values, gathered to one device, are not those expected."""
    assert len(expected) == len(got), f"{len(got)} {what}s, not {len(expected)}"
    for right, value in zip(expected, got, strict=True):
        if isinstance(right, Tensor):
            _compare_tensors(right, value, what, shapes_only)
        elif value is None or isinstance(value, Tensor):
            assert right is None, f"no {what}"
            assert value is None or not bool(value.any()), f"{what} {value}, not {right}"
        elif not shapes_only:
            assert right == value or (right != right and value != value), f"{what} {value!r}, not {right!r}"


def _compare_tensors(right: Tensor, value: Any, what: str, shapes_only: bool) -> None:
    if value is None:
        assert not bool(right.any()), f"no {what}"
        return
    assert value.shape == right.shape, f"{what} of shape {tuple(value.shape)}, not {tuple(right.shape)}"
    assert value.dtype == right.dtype, f"{what} of {value.dtype}, not {right.dtype}"
    if not shapes_only:
        loose = {"rtol": 1e-7, "atol": 1e-7} if right.dtype in (torch.float64, torch.complex128) else {}
        torch.testing.assert_close(value, right.detach(), equal_nan=True, **loose, msg=f"{what}: {{}}".format)
