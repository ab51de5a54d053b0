"""An operator call becomes a cached executable: rule, strategy, redistributions and local operator.

A warm call makes a key of operator, specs and static arguments, finds the executable and runs it: no planning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from dshard.comm import LocalTensor, compare_calls, run, runner, runtime_of
from dshard.comm.rank_checks import enabled as comparing
from dshard.core.call import Call, LocalOp, Operator, views_first, writes_first
from dshard.core.checks import infer
from dshard.core.context import planning_context
from dshard.core.moves import (
    coordinate_of,
    count_write,
    giving_same_memory_once,
    leaves,
    on_all_ranks,
    redistribute_local,
    replace_leaves,
    run_on_ranks,
    sharing_version,
    write_local,
)
from dshard.core.observe import CALL_LOG, OBSERVERS, Decision, log, observed
from dshard.core.operands import common_mesh, operand_of, plan_to, spec_like
from dshard.core.spec import Spec, spec_of
from dshard.core.view_sync import SCATTERS, CopiedView, PartialView, attach_view, propagate_write, register_view
from dshard.core.wrapper import Wrapper, wrap
from dshard.dispatch.fallback import replicate
from dshard.dispatch.registry import FACTS, Instead, Known, alternative_of, known
from dshard.layout import Shape
from dshard.mesh import Coordinate, Mesh
from dshard.ops.custom import asked_for, decomposed
from dshard.ops.decompositions import decomposition_of
from dshard.ops.views import counts_memory, in_memory_as
from dshard.redistribute import Plan
from dshard.rules.expand import Operand
from dshard.rules.strategy import Constraints, Strategy, choose

Executor = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_NUMBERS = frozenset({float, int, bool, complex})


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on distributed tensors, with the result of single-device torch on the global tensors."""
    cls = Wrapper.public
    number = id(func)  # the hash of an operator is slow; `FACTS` keeps it alive, so no other gets its id
    facts = FACTS.get(number) or known(func)
    if facts.instead is not None:
        instead = facts.instead(args)
        if instead is not None:
            if CALL_LOG:
                log((None, func, args, kwargs, None))
            decision = _instead_decision(facts, instead, args, kwargs) if OBSERVERS else None
            if decision is None:
                out = instead(func, args, kwargs)
            else:
                out = observed(decision, instead, (func, args, kwargs))
            if facts.changes:
                _count_change(func, args[0], facts.writes)
            return out
    values = facts.values
    parts: list[Any] = [number]
    for arg in args:
        kind = type(arg)
        parts.append(arg._spec if kind is cls else arg if kind is int and values else _key(arg, values))
    if kwargs:
        parts += [(name, _key(arg, values)) for name, arg in kwargs.items()]
    key = tuple(parts)
    executors = planning_context().executors
    executor = executors.get(key)
    if executor is None:
        executor = executors.add(key, _build(func, facts.op, args, kwargs))
    else:
        executors.hits += 1
    out = _watched(executor, func, args, kwargs) if CALL_LOG or OBSERVERS else executor(args, kwargs)
    if facts.changes:
        _count_change(func, args[0], facts.writes)
    return out


def _count_change(func: OpOverload, operand: Any, written: bool) -> None:
    """After an in-place operator, increment the local tensor's version, and copy the write to views and bases."""
    if isinstance(operand, Wrapper):
        count_write(operand._local)
    if written:
        propagate_write(operand, func)


def _watched(executor: Executor, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    run = executor if isinstance(executor, OperatorExecutable) else None
    if run is not None and OBSERVERS:
        out = observed(run.decision(), run, (args, kwargs))
    else:
        out = executor(args, kwargs)
    log((run, func, args, kwargs, out))
    return out


def _key(arg: Any, values: bool) -> Any:
    kind = type(arg)
    if kind in _NUMBERS:
        return (kind, arg) if values else kind
    if kind is list or kind is tuple:
        return tuple([_key(item, values) for item in arg])
    if isinstance(arg, Wrapper):
        return arg._spec
    if isinstance(arg, Tensor):
        return Tensor, arg.dtype, arg.shape
    return arg


def _build(func: OpOverload, op: Operator | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executor:
    mesh = common_mesh(func, [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)])
    if op is None:
        return _without_rule(func)
    try:
        call, result = _call(func, mesh, args, kwargs)
    except NotImplementedError:  # torch cannot tell what comes out without data
        return _without_rule(func)
    return OperatorExecutable(op, call, result, args, kwargs)


def _call(func: OpOverload, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Any]:
    """The call with specs in place of tensors, and its result on meta tensors."""
    specs = tuple(spec_like(t, mesh) for t in leaves((args, kwargs)) if isinstance(t, Tensor))
    rest = iter(specs)
    spec_args, spec_kwargs = replace_leaves(
        (args, kwargs), lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf
    )
    result = infer(func, *replace_leaves((spec_args, spec_kwargs), _meta))
    outs = tuple(t for t in leaves(result) if isinstance(t, Tensor))
    return Call(func, spec_args, spec_kwargs, specs, outs), result


def _instead_decision(facts: Known, instead: Instead, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision | None:
    """The decision of a call that `instead` runs: an alternative to the rule's candidates, or what the user asked for.

    None for an operator that is made of others: each of these has its own decision.
    """
    func, explicit = facts.func, asked_for(facts.func, args, kwargs)
    alternative = "" if explicit else alternative_of(func, instead)
    if not (explicit or alternative):
        return None
    operands = tuple(operand_of(t._spec) for t in leaves((args, kwargs)) if isinstance(t, Wrapper))
    mesh = operands[0].layout.mesh  # the norms of a list may be of several meshes
    decision = Decision(
        str(func), operands, (), None, None, (), planning_context().topology_of(mesh), explicit=explicit
    )
    if not alternative or facts.op is None:
        return replace(decision, alternative=alternative)
    call, _ = _call(func, mesh, args, kwargs)
    return replace(decision, alternative=alternative, outputs=_operands(call)[1], rule=facts.op.rule(call))


def _meta(leaf: Any) -> Any:
    return leaf.meta() if isinstance(leaf, Spec) else leaf


def _without_rule(func: OpOverload) -> Executor:
    decomposition = decomposition_of(func)
    if decomposition is None:
        return lambda args, kwargs: replicate(func, args, kwargs)
    run_decomposed = decomposed(decomposition)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = run_decomposed(func, args, kwargs)
        return replicate(func, args, kwargs) if out is NotImplemented else out

    return run


class OperatorExecutable:
    """Redistributes the operands, runs the local operator and wraps its outputs, as planned once for its cache key."""

    def __init__(self, op: Operator, call: Call, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.call, self.result = op, call, result
        self.mesh = call.specs[0].layout.mesh
        self.inplace, self.values = writes_first(call.func), op.values
        self.strategy = strategy_of(op, call, keep=self.inplace)
        self.plans = [plan_to(spec, layout) for spec, layout in zip(call.specs, self.strategy.inputs, strict=True)]
        self.out_specs = [
            spec_of(layout, tuple(out.shape), out.stride(), out.dtype, call.specs[0].device)
            for out, layout in zip(call.outs, self.strategy.outputs, strict=True)
        ]
        self.flat = _is_flat(args, kwargs)
        self.rewrites = self.inplace and bool(self.plans[0].steps)
        self.views = views_first(call.func)
        self.gathers = self.views and bool(self.plans[0].steps)
        self.counts_memory = self.views and counts_memory(call)
        self.leaves_terms = self.views and call.func in SCATTERS and _begins_partial(self.strategy)
        self.single = isinstance(result, Tensor) and not self.inplace
        self.places = _places(result, self.out_specs) if not (self.inplace or self.views) else None
        self.compared = comparing()
        slow = self.rewrites or self.gathers or self.leaves_terms or self.counts_memory or self.compared
        self.warm = _WarmOperator(self, args) if self.flat and not slow else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        warm = self.warm
        if warm is not None:
            local = list(args)
            for i in warm.tensors:
                local[i] = args[i]._local
            if type(local[warm.tensors[0]]) is not LocalTensor:
                if warm.operator is None:
                    warm.prepare(self, local)
                for i, mover in warm.moves:
                    local[i] = mover(local[i])
                out = warm.operator(*local, **kwargs)  # type: ignore[misc]  # prepared above
                if self.single:
                    if self.views:
                        return self.wrapped(out, args)
                    return wrap(out, self.out_specs[0])
                if self.places is not None:
                    pairs = zip(out, self.places, strict=True)
                    return tuple([x if spec is None else wrap(x, spec) for x, spec in pairs])
                return self.wrapped(out, args)
        if self.compared:
            compare_calls(f"{self.call.func} of {_call_text(args, kwargs)}", self.mesh)
        local_args, local_kwargs = self.moved(args, kwargs)
        if self.counts_memory:
            local_args = (in_memory_as(self.call.specs[0], local_args[0]), *local_args[1:])
        out = run_on_ranks(self.mesh, self.local_op, local_args, local_kwargs)
        wrapped = self.wrapped(out, args)
        if isinstance(args[0], Wrapper):
            if self.leaves_terms:
                register_view(wrapped, PartialView(args[0], wrapped._local, wrapped._spec, self.call.func, args[1:]))
            elif self.gathers or (self.counts_memory and local_args[0] is not args[0]._local):
                layout = self.strategy.inputs[0]
                register_view(wrapped, CopiedView(args[0], local_args[0], args[0]._spec.with_layout(layout)))
        return wrapped

    def wrapped(self, out: Any, args: tuple[Any, ...]) -> Any:
        """Wrap the local outputs; of an in-place operator, return the operand itself."""
        outputs = self._wrapped(out, args)
        if self.views and getattr(args[0], "_view_sync", None) is not None:
            attach_view(outputs, args[0]._view_sync)
        return outputs

    def _wrapped(self, out: Any, args: tuple[Any, ...]) -> Any:
        if self.inplace:
            if self.rewrites or not isinstance(args[0], Wrapper):
                written = redistribute_local(out, self.out_specs[0], self.call.specs[0].layout, self.call.func)
                write_local(_local(args[0]), written)
            return args[0]
        start = args[0].storage_offset() if self.views else 0  # strides and offset are those of the global tensor
        if isinstance(out, Tensor):
            return wrap(out, self.out_specs[0], start + self.call.outs[0].storage_offset())
        locals_ = iter(t for t in leaves(out) if isinstance(t, Tensor))
        specs = iter(self.out_specs)
        return replace_leaves(
            self.result,
            lambda leaf: (
                wrap(next(locals_), next(specs), start + leaf.storage_offset()) if isinstance(leaf, Tensor) else leaf
            ),
        )

    def moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with each tensor redistributed to the strategy's layout, as a local tensor."""
        plans = iter(self.plans)

        def move_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return run(next(plans), leaf._local if isinstance(leaf, Wrapper) else on_all_ranks(leaf, self.mesh))

        return replace_leaves((args, kwargs), move_leaf)

    def decision(self) -> Decision:
        """The decision that this executable carries out."""
        operands, outputs = _operands(self.call)
        topology = planning_context().topology_of(self.mesh)
        wanted = _constraints(operands, self.inplace)
        return Decision(
            *(str(self.call.func), operands, outputs, self.op.rule(self.call), self.strategy, tuple(self.plans)),
            topology,
            wanted=wanted,
        )

    def local_op(self, coordinate: Coordinate) -> LocalOp:
        """The local operator of the rank at `coordinate`: the rule's kernel, or the operator itself."""
        operator = self.call.func if self.op.kernel is None else self.op.kernel(self.call, self.strategy, coordinate)
        if self.inplace and self._may_look_shared(coordinate):
            return giving_same_memory_once(operator)
        return sharing_version(operator) if self.views else operator

    def _may_look_shared(self, coordinate: Coordinate) -> bool:
        """Whether an operand may be the one written to, by other views, with other strides of a dim split to one."""
        first, *rest = self.call.specs
        local = self.strategy.inputs[0].local_shape(first.shape, coordinate)
        return any(n == 1 < whole for n, whole in zip(local, first.shape, strict=True)) and any(
            spec.shape == first.shape and spec.stride == first.stride for spec in rest
        )


def _call_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments of a call as text: tensors by shape, dtype and layout, all else by its repr."""
    texts = [*map(_argument_text, leaves(args)), *(f"{name}={_argument_text(value)}" for name, value in kwargs.items())]
    return ", ".join(texts)


def _argument_text(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    spec = x._spec if isinstance(x, Wrapper) else None
    layout = "plain" if spec is None else f"[{spec.layout}]"
    return f"{tuple(x.shape)} {x.dtype} {layout}"


def _places(result: Any, specs: list[Spec]) -> list[Spec | None] | None:
    """For each of several outputs its spec, or None where it is no tensor; None if they are nested."""
    if not isinstance(result, tuple) or not all(x is None or isinstance(x, Tensor) for x in result):
        return None
    rest = iter(specs)
    return [next(rest) if isinstance(x, Tensor) else None for x in result]


def _begins_partial(strategy: Strategy) -> bool:
    """Whether the output is partial on mesh axes where the first operand is not."""
    return strategy.outputs[0].partial_axes() != strategy.inputs[0].partial_axes()


def _local(x: Any) -> Tensor:
    return x._local if isinstance(x, Wrapper) else x


class _WarmOperator:
    """Positions of the tensors, their redistributions and the local operator: all that a warm call needs."""

    def __init__(self, call: OperatorExecutable, args: tuple[Any, ...]) -> None:
        self.tensors = [i for i, arg in enumerate(args) if isinstance(arg, Wrapper)]
        self.operator: LocalOp | None = None
        self.moves: list[tuple[int, Callable[[Tensor], Tensor]]] = []

    def prepare(self, call: OperatorExecutable, local: list[Any]) -> None:
        """Compile the redistributions and the local operator for this rank's coordinate, once."""
        operands = [i for i, arg in enumerate(local) if isinstance(arg, Tensor)]
        meta = any(local[i].is_meta for i in operands)
        self.moves = [(i, _redistribution(p, meta)) for i, p in zip(operands, call.plans, strict=True) if p.steps]
        self.operator = call.local_op(coordinate_of(call.mesh))


def _redistribution(p: Plan, meta: bool) -> Callable[[Tensor], Tensor]:
    return (lambda x: run(p, x)) if meta or runtime_of(p.src.mesh) is None else runner(p)


def _is_flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    inside = [leaf for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple) for leaf in leaves(arg)]
    nested = [*inside, *kwargs.values()]
    return not any(isinstance(leaf, Tensor) for leaf in nested) and any(isinstance(arg, Wrapper) for arg in args)


def strategy_of(op: Operator, call: Call, keep: bool = False) -> Strategy:
    """The cheapest strategy; with `keep`, the cheapest that keeps the first operand's layout, if any does."""
    operands, outputs = _operands(call)
    topology = planning_context().topology_of(operands[0].layout.mesh)
    return choose(op.rule(call), operands, outputs, topology, _constraints(operands, keep))


def _constraints(operands: tuple[Operand, ...], keep: bool) -> Constraints:
    return Constraints(keep=operands[0].layout if keep else None)


def _operands(call: Call) -> tuple[tuple[Operand, ...], tuple[tuple[Shape, int], ...]]:
    operands = tuple(map(operand_of, call.specs))
    return operands, tuple((tuple(out.shape), out.itemsize) for out in call.outs)
