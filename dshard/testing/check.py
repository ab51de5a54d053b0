"""Comparison of an operator and its rule with single-device torch, by brute force over placements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dshard import comm
from dshard.core.call import AlternativePlan, Call, Operator
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.trees import leaves, replace_leaves, replace_tensors, tensors_in, with_tensors
from dshard.dispatch.operator import alternatives_of, call_of
from dshard.dispatch.registry import known
from dshard.errors import ArgumentError, LayoutError, NotationError, RuleError
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rules.strategy import Strategy
from dshard.tensor import DTensor
from dshard.testing.rule_rows import (
    Choice,
    Same,
    blaming,
    check_rows,
    has_gradient,
    layouts_of,
    run_on,
    sample_combinations,
    suggestive,
)
from dshard.testing.simulated_ranks import distribute, simulated, whole
from dshard.torch_private import OpOverload, OpOverloadPacket
from dshard.validate import as_int, as_tuple, check_callable, check_type

Op: TypeAlias = OpOverload | Function | str


def check_rule(
    op: Op,
    *samples: object,
    mesh_shapes: Sequence[tuple[int, ...]] = ((2,), (3,), (2, 2)),
    placements: Literal["all"] | Sequence[Placement] = "all",
    gradients: bool = True,
    limit: int = 64,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Verify `op` on distributed tensors against single-device torch, in all layouts of its operands.

    `op` is an operator of torch, a function such as `torch.nn.functional.gelu`, or the name of an operator with a
    registered rule. Each sample is a tuple of its arguments, tensors and others; a dict at its end holds keyword
    arguments. Take sizes that the mesh does not divide, and float64 where gradients count.

    On each mesh, simulated in this process:
    - every strategy that the rule allows is run on local tensors, whether or not it would ever be the cheapest, and so
      is every alternative to the rule; so are those of the operators that a function calls, and of their backward
      passes;
    - the whole operator is run on operands in `placements` (all that exist: each dim sharded, replicated, for floats a
      partial sum), in every combination or, beyond `limit`, in a sample that is the same each time; values and
      gradients are compared.

    `rtol` and `atol` are as in `torch.testing.assert_close`.

    >>> check_rule(torch.mm, (torch.randn(5, 3), torch.randn(3, 4)), mesh_shapes=[(2,)])

    Raises:
        RuleError: a difference; it names the operator, the rule, the mesh, the layouts and what differs.
    """
    function, same = resolve(op), _same(rtol, atol)
    _check_arguments(samples, mesh_shapes, placements, limit)
    for sample in samples:
        call = _Call.of(function, sample)
        expected = call.on_one_device(gradients)
        calls = recorded_calls(function, call.args, call.kwargs, expected.recorded)
        for shape in mesh_shapes:
            mesh = Mesh(shape, device_type=call.device_type())
            for func, args, kwargs in calls:
                check_rows(func, args, kwargs, mesh, same)
            with simulated(mesh):
                for func, args, kwargs in calls:
                    check_alternatives(func, args, kwargs, mesh, same)
                for i, layouts in enumerate(sample_combinations(call.choices(mesh, placements), limit)):
                    call.compare(layouts, expected, i, same)


def check_call(
    op: Op,
    sample: object,
    layouts: Sequence[Layout],
    *,
    gradients: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Verify one call of `op`, on tensors of `sample` in these layouts, against one device; for use with generators.

    On a mesh with processes all ranks call this together, and it runs there; otherwise the ranks are simulated.

    >>> tp = replicated(Mesh((2,), ("tp",)))
    >>> check_call(torch.mul, (torch.ones(3), 2.0), [tp])

    Raises:
        RuleError: a difference.
    """
    call = _Call.of(resolve(op), sample)
    layouts = as_tuple(layouts, "layouts", "give one for each tensor of the sample, in a list", LayoutError)
    n = len(call.operands())
    if len(layouts) != n or not layouts:
        raise LayoutError(f"{len(layouts)} layouts for the {n} tensors of the sample: give one for each, at least one")
    for layout in layouts:
        check_type(layout, Layout, "a layout", "give a dshard.Layout", LayoutError)
    expected = call.on_one_device(gradients)
    with _ranks_of(layouts[0].mesh):
        call.compare(tuple(layouts), expected, 0, _same(rtol, atol))


def _check_arguments(samples: Sequence[object], mesh_shapes: object, placements: object, limit: object) -> None:
    """Refuse arguments that leave nothing to check."""
    shapes = as_tuple(mesh_shapes, "mesh_shapes", "give the shapes of meshes, as in [(2,), (2, 2)]")
    as_int(limit, "limit", least=1)
    if not samples or not shapes:
        what = "samples" if not samples else "meshes"
        raise ArgumentError(f"check_rule without {what} checks nothing: give at least one")
    if placements != "all":
        way_out = "give 'all', or some placements in a list"
        for placement in as_tuple(placements, "placements", way_out):
            check_type(placement, Shard | Replicate | Partial, "placements", way_out)


@dataclass(frozen=True, slots=True)
class _Expected:
    """The results of one device: outputs, incoming gradients of outputs that have one, and gradients of the operands.

    `recorded` says for each operand whether torch has a gradient of it.
    """

    outputs: list[Any]
    incoming: list[Tensor | None]
    recorded: list[bool]
    gradients: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator and its arguments on one device."""

    function: Function
    args: Args
    kwargs: Kwargs

    @classmethod
    def of(cls, function: Function, sample: object) -> _Call:
        args = sample if isinstance(sample, tuple) else (sample,)
        if args and isinstance(args[-1], dict):
            return cls(function, args[:-1], args[-1])
        return cls(function, args, {})

    def operands(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    def device_type(self) -> str:
        return self.operands()[0].device.type if self.operands() else "cpu"

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The outputs for these operands."""
        args, kwargs = with_tensors((self.args, self.kwargs), tensors)
        return leaves(self.function(*args, **kwargs))

    def on_one_device(self, gradients: bool) -> _Expected:
        """The expected results, with gradients of the operands for which torch has them."""
        n = len(self.operands())
        function = self.function
        if gradients and not (isinstance(function, OpOverload) and function._schema.is_mutable):
            differentiable = [has_gradient(x) for x in self.operands()]
            each_alone = ([i == j and differentiable[j] for j in range(n)] for i in range(n))
            expected = self._try(differentiable) or self._try([self._try(some) is not None for some in each_alone])
        else:
            expected = None
        return expected or self._recorded([False] * n)

    def _try(self, differentiable: list[bool]) -> _Expected | None:
        try:
            return self._recorded(differentiable) if any(differentiable) else None
        except (RuntimeError, NotImplementedError):  # an operand without a derivative
            return None

    def _recorded(self, differentiable: list[bool]) -> _Expected:
        pairs = zip(self.operands(), differentiable, strict=True)
        operands = [x.detach().clone().requires_grad_(has_grad) for x, has_grad in pairs]
        outputs = self.run(operands)
        incoming = [_incoming(out, i) for i, out in enumerate(outputs)]
        gradients = [_dense(gradient) for gradient in _backward(outputs, incoming, operands)]
        return _Expected(
            [out.detach() if isinstance(out, Tensor) else out for out in outputs], incoming, differentiable, gradients
        )

    def choices(self, mesh: Mesh, placements: Literal["all"] | Sequence[Placement]) -> list[list[Layout]]:
        """The layouts to test, for each operand."""
        return [layouts_of(x, mesh, placements) for x in self.operands()]

    def compare(self, layouts: Choice, expected: _Expected, seed: int, same: Same) -> None:
        """Run the operator on operands in these layouts, and compare with the expected results."""
        where = f"{_name(self.function)} of [{'], ['.join(map(str, layouts))}] on the mesh ({_mesh_of(layouts)})"
        try:
            operands = [
                distribute(x.detach(), layout, seed=seed + i)
                for i, (x, layout) in enumerate(zip(self.operands(), layouts, strict=True))
            ]
            for x, is_wanted in zip(operands, expected.recorded, strict=True):
                x.requires_grad_(is_wanted)
            outputs = self.run(operands)
            gradients = self._gradients(operands, outputs, expected, seed)
        except Exception as error:
            raise RuleError(f"{where} raised {type(error).__name__}: {error}") from error
        for i, (out, value) in enumerate(zip(outputs, expected.outputs, strict=True)):
            compare(out, value, f"{where}: output {i}", same)
        for i, (gradient, value) in enumerate(zip(gradients, expected.gradients, strict=True)):
            if value is not None and gradient is not None:
                compare(gradient, value, f"{where}: the gradient of operand {i}", same)
            elif value is not None and value.any():
                raise RuleError(f"{where}: operand {i} has no gradient")

    def _gradients(
        self, operands: Sequence[DTensor], outputs: Sequence[object], expected: _Expected, seed: int
    ) -> list[Tensor | None]:
        incoming: list[Tensor | None] = []
        for out, gradient in zip(outputs, expected.incoming, strict=True):
            if gradient is None or not isinstance(out, DTensor):
                incoming.append(None)
            else:
                layout = out.layout.cotangent() if seed % 2 else replicated(out.layout.mesh)
                incoming.append(distribute(gradient, layout))
        return _backward(outputs, incoming, operands)


def compare(actual: object, expected: object, what: str, same: Same) -> None:
    """Compare one output or gradient with the single device's."""
    try:
        if not isinstance(expected, Tensor):
            assert actual == expected, f"{actual!r} instead of {expected!r}"
        elif isinstance(actual, DTensor):
            with comm.plain():
                same(whole(actual).cpu(), expected.cpu())
        else:
            raise AssertionError(f"a {type(actual).__name__}, not a DTensor")
    except AssertionError as error:
        layout = f" [{actual.layout}]" if isinstance(actual, DTensor) else ""
        raise RuleError(f"{what}{layout}: {error}") from None


def _ranks_of(mesh: Mesh) -> AbstractContextManager[None]:
    runtime = comm.runtime_of(mesh)
    real = runtime is not None and dist.is_initialized() and dist.get_backend() != "fake"
    return nullcontext() if real else simulated(mesh)


def _same(rtol: float | None, atol: float | None) -> Same:
    return partial(torch.testing.assert_close, rtol=rtol, atol=atol, equal_nan=True)


def _backward(
    outputs: Sequence[Any], incoming: Sequence[Tensor | None], operands: Sequence[Tensor]
) -> list[Tensor | None]:
    pairs = [(out, gradient) for out, gradient in zip(outputs, incoming, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
    return [x.grad for x in operands]


def _incoming(out: object, seed: int) -> Tensor | None:
    """Return a random incoming gradient for a differentiable output, None for other outputs."""
    if not isinstance(out, Tensor) or not out.requires_grad:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, dtype=out.dtype, generator=generator).to(out.device)


def _dense(x: Tensor | None) -> Tensor | None:
    """Return the tensor, as ordinary zeros if it is one of autograd's tensors without memory."""
    # torch's comparison crashes on its zero tensors, which have no memory
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if x is not None and x._is_zerotensor() else x


def _name(function: Function) -> str:
    return str(function) if isinstance(function, OpOverload) else getattr(function, "__name__", repr(function))


def _mesh_of(layouts: Choice) -> str:
    return str(layouts[0].mesh) if layouts else ""


def check_alternatives(func: OpOverload, args: Args, kwargs: Kwargs, mesh: Mesh, same: Same) -> None:
    """Run `func` by each alternative to its rule, in all layouts of its operands, and compare with torch.

    For ranks that are simulated in this process.
    """
    facts = known(func)
    op, arguments = facts.op, (args, kwargs)
    if op is None or not op.alternatives or facts.is_composed(args):
        return
    expected = run_on(func, arguments, [x.clone() for x in tensors_in(arguments)])
    call, _ = call_of(func, mesh, args, kwargs)
    for strategy, plan in _every_alternative(op, call, mesh):
        with blaming(f"the alternative '{strategy.name}' to the rule of {func}", mesh, strategy):
            _compare(plan, arguments, expected, same)


def _every_alternative(op: Operator, call: Call, mesh: Mesh) -> Iterator[tuple[Strategy, AlternativePlan]]:
    """Yield the alternatives for any layouts of the operands, each that has other layouts once."""
    seen = set()
    for operands in suggestive(op.rule(call), call.specs, mesh):
        placed = _in_layouts(call, [spec.with_layout(x.layout) for spec, x in zip(call.specs, operands, strict=True)])
        for strategy, plan in alternatives_of(op, op.rule(placed), placed).items():
            key = (strategy.name, plan.inputs, plan.outputs)
            if key not in seen:
                seen.add(key)
                yield strategy, plan


def _in_layouts(call: Call, specs: Sequence[Spec]) -> Call:
    rest = iter(specs)
    args, kwargs = replace_leaves((call.args, call.kwargs), lambda leaf: next(rest) if isinstance(leaf, Spec) else leaf)
    return replace(call, args=args, kwargs=kwargs, specs=tuple(specs))


def _compare(plan: AlternativePlan, arguments: tuple[Args, Kwargs], expected: Sequence[Tensor], same: Same) -> None:
    numbered = enumerate(plan.inputs)

    def placed(x: Tensor) -> DTensor:
        seed, layout = next(numbered)
        return distribute(x.detach(), layout, seed=seed)

    args, kwargs = replace_tensors(arguments, placed)
    with torch.no_grad():
        outputs = tensors_in(plan.run(*args, **kwargs))
    for output, value, layout in zip(outputs, expected, plan.outputs, strict=True):
        assert isinstance(output, DTensor)
        assert output.layout == layout, f"an output is laid out [{output.layout}], not [{layout}]"
        same(whole(output), value)


Recorded: TypeAlias = tuple[OpOverload, Args, Kwargs]


def resolve(op: OpOverload | Function | str) -> Function:
    """Return the operator or function that `op` names or is."""
    if isinstance(op, str):
        namespace, colons, name = op.partition("::")
        if not colons or not hasattr(getattr(torch.ops, namespace), name):
            raise NotationError(f"there is no operator {op!r}: write namespace::name, such as 'mylib::fused'")
        return _only_overload(getattr(getattr(torch.ops, namespace), name))
    check_callable(op, "check_rule", "give an operator of torch's, a function, or the name of an operator")
    return _only_overload(op) if isinstance(op, OpOverloadPacket) else op


def _only_overload(op: Any) -> OpOverload:
    overloads = op.overloads()
    if len(overloads) > 1:
        raise NotationError(f"{op} has the overloads {', '.join(overloads)}: give one, such as {op}.{overloads[0]}")
    overload: OpOverload = getattr(op, overloads[0])
    return overload


def recorded_calls(function: Function, args: Args, kwargs: Kwargs, gradients: Sequence[bool]) -> list[Recorded]:
    """List the distinct operators that `function` calls on these arguments, with the arguments of each.

    Its backward pass runs for the operands that `gradients` marks. Views and copies are left out, unless they are the
    function itself.
    """
    rest = iter(gradients)
    leaf_args, leaf_kwargs = replace_tensors((args, kwargs), lambda x: _copy(x).requires_grad_(next(rest)))
    first_calls: dict[object, Recorded] = {}

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        key = (func, str(replace_tensors((args, kwargs), lambda x: (x.shape, x.dtype))))
        if key not in first_calls:
            first_calls[key] = (func, *replace_tensors((args, kwargs), _copy))
        return func(*args, **kwargs)

    with OperatorMode(run):
        outputs = tensors_in(function(*leaf_args, **leaf_kwargs))
        with_grad = [out for out in outputs if out.requires_grad]
        if with_grad:
            torch.autograd.backward(with_grad, [torch.ones_like(out) for out in with_grad])
    calls = [call for call in first_calls.values() if call[0] == function or not _is_trivial(call[0])]
    if isinstance(function, OpOverload) and all(call[0] != function for call in calls):  # torch decomposes it
        calls.append((function, *replace_tensors((args, kwargs), _copy)))
    return calls


def _is_trivial(func: OpOverload) -> bool:
    name = func._schema.name
    return func.is_view or "empty" in name or name.endswith("_like") or name in _TRIVIAL


_TRIVIAL = ("aten::clone", "aten::detach", "aten::copy_", "aten::new_zeros", "aten::new_ones", "aten::lift_fresh")


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()
