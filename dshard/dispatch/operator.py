"""An operator call becomes a cached executable: rule, strategy, redistributions and local operator.

A warm call makes a key of operator, specs and static arguments, finds the executable and runs it: no planning. Of an
operator without a rule the operands are replicated, and every rank computes the full result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.autograd.joined_gradients import add_later
from dshard.callers import asked_by
from dshard.comm import device_of, device_of_result, of_first_rank, ranks_of_group, same_replicas, warn_user
from dshard.core.call import AlternativePlan, Call, LocalOp, Operator, views_first, writes_first
from dshard.core.call_key import call_key, with_numbers
from dshard.core.checks import infer, with_meta_form
from dshard.core.context import planning_context
from dshard.core.executable import (
    AlternativeExecutable,
    ComposedExecutable,
    Executable,
    Finish,
    Values,
    decide,
    decision_of,
    positions_of,
    wrap_as,
)
from dshard.core.moves import (
    count_write,
    redistribute_local,
    replica_broadcasts,
    resolving_conjugates,
    sending,
    sharing_version,
    write_local,
)
from dshard.core.observe import ASKED, OBSERVERS, Decision, observed, planned
from dshard.core.operands import are_on_several_meshes, common_mesh, on_one_mesh, operand_of, plan_to, spec_like
from dshard.core.plain_tensors import is_of_whole
from dshard.core.shared_memory import without_shared
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec, device_of_operands, spec_of, specs_of
from dshard.core.subclasses import refuse_own_rules
from dshard.core.torch_tensors import are_torchs, from_torchs
from dshard.core.torch_wrappers import refuse_collective, refuse_shared_ranks
from dshard.core.trees import leaves, replace_leaves, replace_tensors, tensors_in, with_tensors
from dshard.core.view_sync import (
    COMPUTED,
    RESHAPED_VIEWS,
    SCATTERS,
    CopiedView,
    attach_view,
    part_of,
    propagate_write,
    register_if_copy,
    register_view,
)
from dshard.core.wrapper import Wrapper, is_recorded, wrap, wrap_in_flight, wrap_inference_view
from dshard.dispatch.planned_calls import is_recomputed
from dshard.dispatch.registry import FACTS, known
from dshard.errors import LayoutError
from dshard.layout import Layout, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops.custom import check, decomposed
from dshard.ops.decompositions import decomposition_of
from dshard.ops.foreach import FOREACH
from dshard.ops.random import is_random, seeded_op
from dshard.ops.views import in_memory_of
from dshard.rules.cut_factors import with_blocks
from dshard.rules.rule import Rule
from dshard.rules.strategy import Constraints, Question, Strategy
from dshard.rules.strategy_choice import alternative_strategy, cheapest
from dshard.torch_private import OpOverload, graph_task_id, no_torch_function

Executor = Callable[[Args, Kwargs], Any]
_DETACH, _ADD, _SUM = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor
_KEEP_LAYOUT = frozenset({_DETACH, torch.ops.aten.alias.default})
"""Operators whose result is their operand: of a partial tensor, too, they send nothing, observed or not."""


def dispatch(func: OpOverload, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """`DTensor.__torch_dispatch__`: run `func`, with the result of single-device torch on the global tensors."""
    kwargs = kwargs or {}
    if len(types) > 1:
        refuse_own_rules(str(func), types)
        if are_torchs(types):  # gradients of code that makes torch's tensors of dshard's
            args, kwargs = from_torchs(args, kwargs)
    if func is _DETACH:
        x = args[0]
        in_inference = torch.is_inference_mode_enabled()
        if "_lazy_local" in x.__dict__ and not in_inference:  # a gradient that is accumulated may be in flight
            return wrap_in_flight(x._lazy_local, x._spec)
        if type(x._local_tensor) is Tensor and x._view_sync is None and not OBSERVERS:
            with no_torch_function():
                start = x.storage_offset()
            # not a view of `_local_tensor`, which would have a version counter of its own
            wrap_one = partial(wrap_inference_view, x) if in_inference else wrap
            return wrap_one(x._local_tensor, x._spec, start)
    elif func is _ADD and not kwargs and "_lazy_local" in getattr(args[1], "__dict__", ()) and add_later(*args):
        return args[0]
    number = id(func)  # the hash of an operator is slow; `FACTS` keeps it alive, so no other gets its id
    facts = FACTS.get(number) or known(func)
    composed = facts.composed
    if composed is not None and composed.applies(args):
        if OBSERVERS and composed.is_requested(func, args, kwargs):
            out = observed(decision_of(func, args, kwargs, why=ASKED), composed.run, (func, args, kwargs))
        else:
            out = composed.run(func, args, kwargs)
        if facts.changes:
            _count_change(func, args[0], facts.writes)
        return out
    if facts.reads:
        args = without_shared(func, args, kwargs)
    is_gradient = func is _SUM and graph_task_id() >= 0 and not torch.is_grad_enabled() and not is_recomputed()
    key = call_key(-number if is_gradient else number, args, kwargs, facts.values)
    executors = planning_context().executors
    executor = executors.get(key)
    if executor is None:
        planned_args, planned_kwargs = with_numbers((args, kwargs), facts.values)
        executor = executors.add(key, _build(func, facts.op, planned_args, planned_kwargs, is_gradient))
    else:
        executors.hits += 1
    decision = getattr(executor, "decision", None) if OBSERVERS else None
    out = executor(args, kwargs) if decision is None else observed(decision, executor, (args, kwargs))
    if facts.changes:
        _count_change(func, args[0], facts.writes)
    return out


def _count_change(func: OpOverload, operand: object, written: bool) -> None:
    """After an in-place operator, increment the local tensor's version, and copy the write to views and bases."""
    if isinstance(operand, Wrapper):
        count_write(operand._local_tensor)
    if written:
        propagate_write(operand, func)


def _build(func: OpOverload, op: Operator | None, args: Args, kwargs: Kwargs, is_gradient: bool) -> Executor:
    plan_lists = FOREACH.get(func)
    if plan_lists is not None:
        return plan_lists(func, args, kwargs)
    tensors = tensors_in((args, kwargs))
    if are_on_several_meshes(tensors):
        return ComposedExecutable(None, partial(_on_one_mesh, func))
    mesh = common_mesh(func, tensors)
    if op is None:
        return _without_rule(func, args, kwargs)
    try:
        call, result = call_of(func, mesh, args, kwargs)
    except NotImplementedError:  # torch cannot tell what comes out without data
        return _without_rule(func, args, kwargs)
    executable = operator_executable(op, call, result, positions_of(args, kwargs), is_gradient)
    if func in _KEEP_LAYOUT and isinstance(executable, Executable):
        executable.compared = False  # they come here only where observed, which may be on some ranks alone
    return executable


def _on_one_mesh(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    if func is torch.ops.aten.copy_.default and not is_recorded(args[:2]):  # as in load_state_dict
        x, source, *rest = args
        meshes = [t._spec.layout.mesh for t in (x, source)]
        if x.shape == source.shape and {*meshes[0].ranks} == {*meshes[1].ranks}:
            args = (x, redistribute(source, x._spec.layout), *rest)
    return dispatch(func, (), *on_one_mesh(func, args, kwargs))


def call_of(func: OpOverload, mesh: Mesh, args: Args, kwargs: Kwargs) -> tuple[Call, object]:
    """The call with specs in place of tensors, and its result on meta tensors."""
    specs = tuple([spec_like(t, mesh) for t in tensors_in((args, kwargs))])
    spec_args, spec_kwargs = with_tensors((args, kwargs), specs)
    result = infer(func, *replace_leaves((spec_args, spec_kwargs), lambda x: x.meta() if isinstance(x, Spec) else x))
    return Call(func, spec_args, spec_kwargs, specs, tuple(tensors_in(result))), result


def _without_rule(func: OpOverload, args: Args, kwargs: Kwargs) -> Executor:
    decomposition = decomposition_of(func)
    if decomposition is None and not is_random(func):
        return replicated_executable(func, args, kwargs)
    if decomposition is None:  # the random numbers of each call are its own
        return partial(replicate, func)
    run_decomposed = decomposed(decomposition)

    def run(args: Args, kwargs: Kwargs) -> Any:
        out = run_decomposed(func, args, kwargs)
        return replicate(func, args, kwargs) if out is NotImplemented else out

    return run


def operator_executable(
    op: Operator, call: Call, result: object, positions: Sequence[int] | None, once: bool = False
) -> Executable | AlternativeExecutable:
    """The executable of a call by the cheapest strategy of its rule, or by a cheaper alternative.

    `result` is the result of the call on meta tensors; `positions` are the positions of the distributed arguments, None
    if tensors are nested or named. `once` says that the result is read once, as a gradient is.
    """
    keeps = writes_first(call.func) or call.func in _KEEP_LAYOUT
    constraints = Constraints(keep=call.specs[0].layout if keeps else None, once=once and not keeps)
    rule = op.rule(call)
    if op.kernel is None or op.blocks:
        for spec in call.specs:
            if spec.layout.blocks:
                rule = with_blocks(rule, list(map(operand_of, call.specs)))
                break
    decision, choice = decide(str(call.func), rule, call.specs, call.outs, constraints)
    alternatives = alternatives_of(op, rule, call)
    strategy = cheapest(choice.strategy, [*alternatives])
    decision = replace(decision, choice=replace(choice, strategy=strategy, alternatives=tuple(alternatives)))
    if strategy in alternatives:
        return AlternativeExecutable(decision, call.specs, strategy, alternatives[strategy])
    specs = specs_of(strategy.outputs, call.outs, device_of_operands(call.specs, call.kwargs.get("device")))
    is_moved = bool(decision.plans[0].steps)
    return Executable(
        decision,
        partial(_local_op, op, call, strategy),
        specs,
        positions,
        _finish(call, result, strategy, is_moved, specs),
        prepare=in_memory_of(call, is_moved),
    )


def _local_op(op: Operator, call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """The local operator of the rank at `coordinate`: the rule's kernel, or the operator itself."""
    operator = with_meta_form(call.func) if op.kernel is None else op.kernel(call.at(strategy, coordinate))
    if any(spec.dtype.is_complex for spec in call.specs):
        operator = resolving_conjugates(operator)
    return sharing_version(operator) if views_first(call.func) else operator


def _finish(call: Call, result: object, strategy: Strategy, is_moved: bool, specs: Sequence[Spec]) -> Finish:
    """The `Finish` that wraps the local results; `is_moved` says whether the first operand is redistributed."""
    if writes_first(call.func):
        return _finish_write(call, is_moved, specs)
    if views_first(call.func):
        return _finish_view(call, result, strategy, specs)
    if isinstance(result, Tensor):
        return wrap_as(specs[0])
    if isinstance(result, tuple) and all(x is None or isinstance(x, Tensor) for x in result):
        rest = iter(specs)
        places = [None if x is None else next(rest) for x in result]
        return lambda out, args, local: tuple(
            [x if spec is None else wrap(x, spec) for x, spec in zip(out, places, strict=True)]
        )
    return lambda out, args, local: _wrap_nested(out, result, specs)


def _wrap_nested(
    out: object, result: object, specs: Sequence[Spec], start: int = 0, wrap_one: Callable[..., Wrapper] = wrap
) -> Any:
    """Wrap the local results `out` in the structure of `result`; `start` is the storage offset of their base."""
    pairs = zip([t for t in leaves(out) if isinstance(t, Tensor)], specs, strict=True)
    return replace_leaves(
        result,
        lambda leaf: wrap_one(*next(pairs), start + leaf.storage_offset()) if isinstance(leaf, Tensor) else leaf,
    )


def _finish_write(call: Call, is_moved: bool, specs: Sequence[Spec]) -> Finish:
    """The `Finish` of an in-place operator: redistribute a redistributed first operand back, and return the operand."""

    def finish(out: Any, args: Values, local: Values) -> object:
        target = args[0]
        if is_moved or not isinstance(target, Wrapper):
            written = redistribute_local(out, specs[0], call.specs[0].layout, call.func)
            write_local(target._local_tensor if isinstance(target, Wrapper) else target, written)
        return target

    return finish


def _finish_view(call: Call, result: object, strategy: Strategy, specs: Sequence[Spec]) -> Finish:
    """The `Finish` of an operator that makes views, with strides and offsets of the global tensor.

    Views that have memory of their own are registered, so that writes are copied between them and their base.
    """
    input_layout = strategy.inputs[0]
    leaves_terms = call.func in SCATTERS and strategy.outputs[0].partial_axes() != input_layout.partial_axes()
    has_own_memory = leaves_terms or call.func in COMPUTED
    reshapes = call.func in RESHAPED_VIEWS
    offset = result.storage_offset() if isinstance(result, Tensor) else None
    itemsize = specs[0].itemsize if specs else 1

    def finish(out: Any, args: Values, local: Values) -> object:
        base = args[0]
        with no_torch_function():
            start = base.storage_offset()
            if base.itemsize != itemsize:
                start = start * base.itemsize // itemsize
        if has_own_memory and offset is not None:
            return part_of(base, out, specs[0], start + offset, call.func, tuple(args[1:]))
        wrap_one = partial(wrap_inference_view, base) if torch.is_inference_mode_enabled() else wrap
        if offset is None:
            views = _wrap_nested(out, result, specs, start, wrap_one)
        else:
            views = wrap_one(out, specs[0], start + offset)
        if not isinstance(base, Wrapper):
            return views
        if base._view_sync is not None:
            attach_view(views, base._view_sync)
        if local[0] is not base._local_tensor:
            register_view(views, CopiedView(base, local[0], base._spec.with_layout(input_layout)))
        elif reshapes and (type(out) is not Tensor or out.data_ptr() != local[0].data_ptr()):
            register_if_copy(views, out, base)
        return views

    return finish


def alternatives_of(op: Operator, rule: Rule, call: Call) -> dict[Strategy, AlternativePlan]:
    """The alternatives to the rule that apply to a call, priced, each with its plan.

    There are none for in-place operators, nor for operands that are sharded in blocks, as alternatives are of ranges.
    """
    if not op.alternatives or writes_first(call.func) or any(spec.layout.blocks for spec in call.specs):
        return {}
    candidates = {}
    for alternative in op.alternatives:
        plans = alternative.plan(call, rule) or ()
        for plan in (plans,) if isinstance(plans, AlternativePlan) else plans:
            candidates[_priced(alternative.name, rule, call, plan)] = plan
    return candidates


def _priced(name: str, rule: Rule, call: Call, plan: AlternativePlan) -> Strategy:
    topology = planning_context().topology_of(call.specs[0].layout.mesh)
    question = Question(rule, tuple(map(operand_of, call.specs)), call.out_sizes, topology)
    sent = [collective for each, itemsize in plan.plans for collective in planned(each, itemsize, topology)]
    seconds = sum(each.seconds for each, _ in plan.plans) + sum(each.seconds for each in plan.exchanges)
    return alternative_strategy(name, question, (plan.inputs, plan.outputs), (*sent, *plan.exchanges), seconds)


def replicate(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator without a rule on replicated operands, on every rank, as planned for this call alone."""
    executable = replicated_executable(func, args, kwargs)
    return observed(executable.decision, executable, (args, kwargs)) if OBSERVERS else executable(args, kwargs)


def replicated_executable(func: OpOverload, args: Args, kwargs: Kwargs) -> Executable:
    """The executable of an operator without a rule: replicated operands, the full result on every rank.

    Warns once for each operator, on one rank, unless the shape of its result depends on values, so that no rule has it.
    The executable of a random operator serves one call.
    """
    random, tensors = is_random(func), tensors_in((args, kwargs))
    mesh = common_mesh(func, tensors)
    layout = replicated(mesh)
    if func.namespace == "c10d":
        given = [spec_like(t, mesh).layout for t in tensors]
        layout = given[0] if _is_of_whole(func, args, given) else layout  # it writes where they lie
    if func not in _WARNED and not random and torch.Tag.dynamic_output_shape not in func.tags:
        warn_user(f"{func} has no rule: its operands are gathered and every rank computes all of it", mesh)
        _WARNED.add(func)
    check(func, args, kwargs)
    specs = [spec_like(t, mesh) for t in tensors]
    topology, why = planning_context().topology_of(mesh), "no rule: every rank computes all of it"
    plans = tuple([plan_to(spec, layout, topology) for spec in specs])
    decision = Decision(str(func), tuple(map(operand_of, specs)), topology, plans=plans, why=why)
    local_op = seeded_op(func, mesh, device_of(mesh), kwargs) if random else with_meta_form(func)
    if any(spec.dtype.is_complex for spec in specs):
        local_op = resolving_conjugates(local_op)
    return Executable(
        decision, lambda at: local_op, (), positions_of(args, kwargs), partial(_finish_replicated, func, layout)
    )


def _is_of_whole(func: OpOverload, args: Args, layouts: Sequence[Layout]) -> bool:
    """Whether Python code gives a collective of torch's whole tensors; refused, if other tensors of the group's ranks.

    Here arrive those of torch's wrapper for data parallelism, and all that torch 2.11 does not tell tensors of.
    """
    name, ranks = func._schema.name.removeprefix("c10d::").rstrip("_"), ranks_of_group(args)
    if asked_by("torch.distributed.distributed_c10d", through=("dshard",)) and is_of_whole(name, layouts, ranks):
        return True
    if name != "broadcast":  # which the wrapper calls
        refuse_collective(name.replace("all", "all_", 1), ranks, layouts[0])
    refuse_shared_ranks(f"{func}, as DistributedDataParallel calls it,", ranks, layouts[0].mesh)
    return False


def _finish_replicated(func: OpOverload, layout: Layout, result: object, args: Values, local: Values) -> Any:
    """Write back operands that the operator wrote to, and wrap the results as replicated."""
    _refuse_sparse(func, result)
    if func in UNREPEATABLE:
        result = replace_tensors(result, lambda leaf: _first_rank_result(func, leaf, layout))
    for i, (operand, argument, written) in enumerate(zip(args, func._schema.arguments, local, strict=False)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for target, value in zip(tensors_in(operand), tensors_in(written), strict=True):
                if isinstance(target, Wrapper):
                    there = redistribute_local(value, target._spec.with_layout(layout), target._spec.layout, func)
                    write_local(target._local_tensor, there)
                    if target is not operand or i:  # a first operand is counted by `dispatch`
                        _count_change(func, target, written=True)
    returns = func._schema.returns
    if not returns or (writes_first(func) and returns[0].alias_info is not None):
        return args[0] if returns else None
    out = replace_tensors(result, lambda leaf: wrap(leaf, _replicated_spec(leaf, layout)))
    if views_first(func) and isinstance(args[0], Wrapper):
        register_view(out, CopiedView(args[0], local[0], args[0]._spec.with_layout(layout)))
    return out


def _refuse_sparse(func: OpOverload, result: object) -> None:
    kinds = {t.layout for t in tensors_in(result)} - {torch.strided}
    if kinds:
        raise LayoutError(
            f"{func} gives a tensor of layout {kinds.pop()}: a distributed tensor is strided; "
            "call it on x.full_tensor(), or on the local parts"
        )


def _replicated_spec(local: Tensor, layout: Layout) -> Spec:
    of_one_rank = of_first_rank(local)
    device = device_of_result(of_one_rank, layout.mesh)
    return spec_of(layout, tuple(of_one_rank.shape), of_one_rank.stride(), of_one_rank.dtype, device)


def _first_rank_result(func: OpOverload, local: Tensor, layout: Layout) -> Tensor:
    """The result of the first rank of each mesh axis, broadcast to all ranks, for an operator whose runs differ."""
    if not OBSERVERS:
        return same_replicas(local, layout)
    spec = _replicated_spec(local, layout)
    return observed(sending(str(func), [spec], replica_broadcasts(spec)), same_replicas, (local, layout))  # type: ignore[no-any-return]


UNREPEATABLE = frozenset({torch.ops.aten.linalg_lstsq.default})
"""Operators whose results differ in the last bits from call to call: all ranks take the first rank's."""

_WARNED: set[OpOverload] = set()
