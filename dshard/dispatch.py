"""An operator call becomes a cached executor: rule, strategy, redistributions and local operator, looked up by specs.

The class of distributed tensors is passed in, so that this layer lies below it. A warm call makes a key, finds the
executor and runs it: no planning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.comm import LocalTensor, device_of, run, runner, runtime_of, same_replicas, unstack
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, Shape, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops.call import Call, LocalOp, Op, views_first, writes_first
from dshard.ops.checks import infer
from dshard.ops.custom import UNREPEATABLE, check, decomposed
from dshard.ops.decompositions import decomposition_of
from dshard.ops.expand import Operand
from dshard.ops.moving import coordinate_of, leaves, move, on_all_ranks, replace_leaves, run_on_ranks, write_local
from dshard.ops.observe import OBSERVERS, Decision, observed
from dshard.ops.origin import SCATTERS, Origin, Terms, mark, remember, settle
from dshard.ops.random import is_random, seeded_op
from dshard.ops.registry import FACTS, known
from dshard.ops.settings import current
from dshard.ops.spec import Spec, contiguous_stride, spec_of
from dshard.ops.strategy import Strategy, Wanted, choose
from dshard.ops.views import counts_memory, in_memory_as
from dshard.redistribute import Plan, plan

Executor = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_WARNED: set[OpOverload] = set()
_NUMBERS = frozenset({float, int, bool, complex})
Seen: TypeAlias = tuple[Any, Any, tuple[Any, ...], dict[str, Any], Any]
"""What ran: an executor or a product, or None for what is neither, the operator, its arguments, and what came out."""
SEEN: list[list[Seen]] = []
"""Where what runs is written down, for as long as somebody watches."""


def dispatch(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on distributed tensors of class `cls`, with the result of single-device torch on the whole tensors."""
    number = id(func)  # its own hash is slow, and what is known of it keeps it alive
    facts = FACTS.get(number) or known(func)
    if facts.instead is not None:
        instead = facts.instead(args)
        if instead is not None:
            for seen in SEEN:
                seen.append((None, func, args, kwargs, None))
            out = instead(cls, func, args, kwargs)
            if facts.writes:
                settle(args[0])
            return out
    values = facts.values
    parts: list[Any] = [number]
    for arg in args:
        kind = type(arg)
        parts.append(arg._spec if kind is cls else arg if kind is int and values else _key(cls, arg, values))
    if kwargs:
        parts += [(name, _key(cls, arg, values)) for name, arg in kwargs.items()]
    key = tuple(parts)
    executors = current().executors
    executor = executors.get(key)
    if executor is None:
        executor = executors.add(key, _build(cls, func, facts.op, args, kwargs))
    else:
        executors.hits += 1
    if SEEN:
        out = _seen(executor, func, args, kwargs)
    elif OBSERVERS and isinstance(executor, Run):
        out = observed(executor.decision(), executor, (args, kwargs))
    else:
        out = executor(args, kwargs)
    if facts.writes:
        settle(args[0])
    return out


def _seen(executor: Executor, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = executor(args, kwargs)
    for seen in SEEN:
        seen.append((executor if isinstance(executor, Run) else None, func, args, kwargs, out))
    return out


def _key(cls: Any, arg: Any, values: bool) -> Any:
    kind = type(arg)
    if kind in _NUMBERS:
        return (kind, arg) if values else kind
    if kind is list or kind is tuple:
        return tuple([_key(cls, item, values) for item in arg])
    if isinstance(arg, cls):
        return arg._spec
    if isinstance(arg, Tensor):
        return Tensor, arg.dtype, arg.shape
    return arg


def _build(cls: Any, func: OpOverload, op: Op | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executor:
    tensors = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
    mesh = common_mesh(cls, func, tensors)
    if op is None:
        return _without_rule(cls, func)
    specs = tuple(spec_like(cls, t, mesh) for t in tensors)
    rest = iter(specs)
    spec_args, spec_kwargs = replace_leaves(
        (args, kwargs), lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf
    )
    try:
        result = infer(func, *replace_leaves((spec_args, spec_kwargs), _meta))
    except NotImplementedError:  # torch cannot tell what comes out without data
        return _without_rule(cls, func)
    outs = tuple(t for t in leaves(result) if isinstance(t, Tensor))
    call = Call(func, spec_args, spec_kwargs, specs, outs)
    return Run(cls, op, call, result, args, kwargs)


def _meta(leaf: Any) -> Any:
    return leaf.meta() if isinstance(leaf, Spec) else leaf


def _without_rule(cls: Any, func: OpOverload) -> Executor:
    decomposition = decomposition_of(func)
    if decomposition is None:
        return lambda args, kwargs: replicate(cls, func, args, kwargs)
    run_decomposed = decomposed(decomposition)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = run_decomposed(cls, func, args, kwargs)
        return replicate(cls, func, args, kwargs) if out is NotImplemented else out

    return run


class Run:
    """Redistribute the operands, run the local operator, wrap its outputs; all but the running done once."""

    def __init__(
        self, cls: Any, op: Op, call: Call, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.cls, self.op, self.call, self.result = cls, op, call, result
        self.mesh = call.specs[0].layout.mesh
        self.inplace, self.values = writes_first(call.func), op.values
        self.strategy = strategy_of(op, call, keep=self.inplace)
        self.plans = [_plan(spec, layout) for spec, layout in zip(call.specs, self.strategy.inputs, strict=True)]
        self.out_specs = [
            spec_of(layout, tuple(out.shape), out.stride(), out.dtype, call.specs[0].device)
            for out, layout in zip(call.outs, self.strategy.outputs, strict=True)
        ]
        self.flat = _is_flat(cls, args, kwargs)
        self.rewrites = self.inplace and bool(self.plans[0].steps)
        self.views = views_first(call.func)
        self.gathers = self.views and bool(self.plans[0].steps)
        self.counts_memory = self.views and counts_memory(call)
        self.leaves_terms = self.views and call.func in SCATTERS and _begins(self.strategy)
        self.single = isinstance(result, Tensor) and not self.inplace
        self.places = _places(result, self.out_specs) if not (self.inplace or self.views) else None
        self.warm = (
            _Warm(self, args)
            if self.flat and not (self.rewrites or self.gathers or self.leaves_terms or self.counts_memory)
            else None
        )

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
                    return self.cls._wrap(out, self.out_specs[0])
                if self.places is not None:
                    wrap = self.cls._wrap
                    pairs = zip(out, self.places, strict=True)
                    return tuple([x if spec is None else wrap(x, spec) for x, spec in pairs])
                return self.wrapped(out, args)
        local_args, local_kwargs = self.moved(args, kwargs)
        if self.counts_memory:
            local_args = (in_memory_as(self.call.specs[0], local_args[0]), *local_args[1:])
        out = run_on_ranks(self.mesh, self.local_op, local_args, local_kwargs)
        wrapped = self.wrapped(out, args)
        if isinstance(args[0], self.cls):
            if self.leaves_terms:
                remember(wrapped, Terms(args[0], wrapped._local, wrapped._spec, self.call.func, args[1:]))
            elif self.gathers or (self.counts_memory and local_args[0] is not args[0]._local):
                layout = self.strategy.inputs[0]
                remember(wrapped, Origin(args[0], local_args[0], args[0]._spec.with_layout(layout)))
        return wrapped

    def wrapped(self, out: Any, args: tuple[Any, ...]) -> Any:
        """The distributed outputs; of an in-place operator, the operand itself."""
        outputs = self._wrapped(out, args)
        if self.views and getattr(args[0], "_origin", None) is not None:
            mark(outputs, args[0]._origin)
        return outputs

    def _wrapped(self, out: Any, args: tuple[Any, ...]) -> Any:
        if self.inplace:
            if self.rewrites or not isinstance(args[0], self.cls):
                write_local(_local(self.cls, args[0]), run(_plan(self.out_specs[0], self.call.specs[0].layout), out))
            return args[0]
        start = args[0].storage_offset() if self.views else 0  # strides, and where they start, are of the whole tensor
        if isinstance(out, Tensor):
            return self.cls._wrap(out, self.out_specs[0], start + self.call.outs[0].storage_offset())
        locals_ = iter(t for t in leaves(out) if isinstance(t, Tensor))
        specs = iter(self.out_specs)
        return replace_leaves(
            self.result,
            lambda leaf: (
                self.cls._wrap(next(locals_), next(specs), start + leaf.storage_offset())
                if isinstance(leaf, Tensor)
                else leaf
            ),
        )

    def moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with local tensors under the strategy's layouts, wherever they stand."""
        plans = iter(self.plans)

        def move_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return run(next(plans), leaf._local if isinstance(leaf, self.cls) else on_all_ranks(leaf, self.mesh))

        return replace_leaves((args, kwargs), move_leaf)

    def decision(self) -> Decision:
        """What was chosen."""
        operands, outputs = _operands(self.call)
        topology = current().topology_of(self.mesh)
        rule = self.op.rule(self.call)
        return Decision(str(self.call.func), operands, outputs, rule, self.strategy, tuple(self.plans), topology)

    def local_op(self, coordinate: Coordinate) -> LocalOp:
        """The local operator of the rank at `coordinate`."""
        return self.call.func if self.op.kernel is None else self.op.kernel(self.call, self.strategy, coordinate)


def _places(result: Any, specs: list[Spec]) -> list[Spec | None] | None:
    """For each of several outputs its spec, or None where it is no tensor; None if they are nested."""
    if not isinstance(result, tuple) or not all(x is None or isinstance(x, Tensor) for x in result):
        return None
    rest = iter(specs)
    return [next(rest) if isinstance(x, Tensor) else None for x in result]


def _begins(strategy: Strategy) -> bool:
    """Whether the output is pending where the first operand is not."""
    return strategy.outputs[0].partial_axes() != strategy.inputs[0].partial_axes()


def _local(cls: Any, x: Any) -> Tensor:
    return x._local if isinstance(x, cls) else x  # type: ignore[no-any-return]


class _Warm:
    """What a call with real processes needs: where the tensors stand, how each moves, this rank's local operator."""

    def __init__(self, call: Run, args: tuple[Any, ...]) -> None:
        self.tensors = [i for i, arg in enumerate(args) if isinstance(arg, call.cls)]
        self.operator: LocalOp | None = None
        self.moves: list[tuple[int, Callable[[Tensor], Tensor]]] = []

    def prepare(self, call: Run, local: list[Any]) -> None:
        """Look up groups and operator, once."""
        operands = [i for i, arg in enumerate(local) if isinstance(arg, Tensor)]
        meta = any(local[i].is_meta for i in operands)
        self.moves = [(i, _mover(p, meta)) for i, p in zip(operands, call.plans, strict=True) if p.steps]
        self.operator = call.local_op(coordinate_of(call.mesh))


def _mover(p: Plan, meta: bool) -> Callable[[Tensor], Tensor]:
    return (lambda x: run(p, x)) if meta or runtime_of(p.src.mesh) is None else runner(p)


def _plan(spec: Spec, layout: Layout) -> Plan:
    return plan(spec.layout, layout, spec.shape, spec.itemsize, current().topology_of(layout.mesh))


def _is_flat(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    inside = [leaf for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple) for leaf in leaves(arg)]
    found = [*inside, *kwargs.values()]
    return not any(isinstance(leaf, Tensor) for leaf in found) and any(isinstance(arg, cls) for arg in args)


def strategy_of(op: Op, call: Call, keep: bool = False) -> Strategy:
    """The cheapest strategy; with `keep`, one that leaves the first operand in its layout where there is such."""
    operands, outputs = _operands(call)
    topology = current().topology_of(operands[0].layout.mesh)
    return choose(op.rule(call), operands, outputs, topology, Wanted(keep=operands[0].layout if keep else None))


def _operands(call: Call) -> tuple[tuple[Operand, ...], tuple[tuple[Shape, int], ...]]:
    operands = tuple(Operand(spec.layout, spec.shape, spec.itemsize) for spec in call.specs)
    return operands, tuple((tuple(out.shape), out.itemsize) for out in call.outs)


def replicate(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on whole tensors, on every rank: what is done for an operator without a rule. Warns once for each."""
    random = is_random(func)
    if func not in _WARNED and not random:
        _WARNED.add(func)
        warnings.warn(f"{func} has no rule: its operands are gathered and every rank computes all of it", stacklevel=2)
    tensors = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
    whole = replicated(common_mesh(cls, func, tensors))
    check(cls, func, args, kwargs)
    if OBSERVERS:
        specs = [spec_like(cls, t, whole.mesh) for t in tensors]
        operands = tuple(Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs)
        plans = tuple(_plan(spec, whole) for spec in specs)
        decision = Decision(str(func), operands, (), None, None, plans, current().topology_of(whole.mesh))
        return observed(decision, _replicate, (cls, func, args, kwargs, whole, random))
    return _replicate(cls, func, args, kwargs, whole, random)


def _replicate(cls: Any, func: OpOverload, args: Any, kwargs: Any, whole: Layout, random: bool) -> Any:
    local_args, local_kwargs = replace_leaves(
        (args, kwargs), lambda leaf: move(leaf._local, leaf._spec, whole) if isinstance(leaf, cls) else leaf
    )
    local_op = seeded_op(func, whole.mesh, device_of(whole.mesh), kwargs) if random else func
    result = run_on_ranks(whole.mesh, lambda coordinate: local_op, local_args, local_kwargs)
    _refuse_sparse(func, result)
    if func in UNREPEATABLE:
        result = replace_leaves(result, lambda leaf: same_replicas(leaf, whole) if isinstance(leaf, Tensor) else leaf)
    for given, argument, local in zip(args, func._schema.arguments, local_args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, cls):
            write_local(given._local, move(local, given._spec.with_layout(whole), given._spec.layout))
    if writes_first(func):
        return args[0]
    out = replace_leaves(
        result, lambda leaf: cls._wrap(leaf, _whole_spec(leaf, whole)) if isinstance(leaf, Tensor) else leaf
    )
    if views_first(func) and isinstance(args[0], cls):
        remember(out, Origin(args[0], local_args[0], args[0]._spec.with_layout(whole)))
    return out


def _refuse_sparse(func: OpOverload, result: Any) -> None:
    kinds = {t.layout for t in leaves(result) if isinstance(t, Tensor)} - {torch.strided}
    if kinds:
        raise LayoutError(
            f"{func} gives a tensor of layout {kinds.pop()}: a distributed tensor is strided; "
            "call it on x.full_tensor(), or on the local parts"
        )


def _whole_spec(local: Tensor, whole: Layout) -> Spec:
    one = next(iter(unstack(local).values())) if type(local) is LocalTensor else local
    return spec_of(whole, tuple(one.shape), one.stride(), one.dtype, one.device)


def common_mesh(cls: Any, func: object, tensors: list[Tensor]) -> Mesh:
    """The mesh of all distributed tensors among `tensors`.

    Raises:
        MeshError: they lie on different meshes.
    """
    meshes = {t._spec.layout.mesh for t in tensors if isinstance(t, cls)}
    if len(meshes) > 1:
        listed = " and ".join(f"({mesh}) of ranks {mesh.ranks}" for mesh in meshes)
        raise MeshError(
            f"{func}: operands on the meshes {listed}; redistribute them to one mesh first, as in "
            "x.redistribute(y.device_mesh, placements)"
        )
    mesh: Mesh = meshes.pop()
    return mesh


def spec_like(cls: Any, t: Any, mesh: Mesh) -> Spec:
    """The spec of an operand; a plain tensor, which a composite operator made alike on all ranks, is replicated."""
    if isinstance(t, cls):
        return t._spec  # type: ignore[no-any-return]
    return spec_of(replicated(mesh), tuple(t.shape), contiguous_stride(tuple(t.shape)), t.dtype, t.device)
