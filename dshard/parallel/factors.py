"""Factors that dims of parameters and activations share, read from a run of a module on tensors without data.

Every operator's rule says which dims of its tensors carry the same factor. Joined over all operators of a forward pass,
factors become classes: the batch, the features of the residual stream, the heads of an attention, the vocabulary. No
class of `nn.Module` is known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard.comm import are_mixed, has_only_shape, plain
from dshard.core.call import Call
from dshard.core.checks import with_meta_form
from dshard.core.observe import OperatorMode, observing
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import specs_of
from dshard.core.trees import map_tensors, nested_tensors, replace_tensors, tensors_in, with_tensors
from dshard.core.wrapper import Wrapper
from dshard.dispatch.registry import find
from dshard.errors import LayoutError
from dshard.layout import replicated
from dshard.mesh import Mesh
from dshard.ops.decompositions import DECOMPOSITIONS, decomposition_of
from dshard.ops.experts.experts_call import PlainExperts
from dshard.ops.fused_loss.fused_call import OF_WHOLE_LOGITS
from dshard.parallel.expert_modules import experts_as_operators
from dshard.parallel.forward_values import ForwardValues, named_inputs
from dshard.parallel.reachable_state import ReachableState
from dshard.rules.rule import Rule, Term, factor_sizes
from dshard.torch_private import OpOverload, disable_modes, no_functions

ONE = replicated(Mesh((1,), ("one",)))
TracedCalls: TypeAlias = Sequence[tuple[str, Hashable]]
"""The operators of a forward pass in order: the module that calls each, and what it is called with but for values."""
Nodes = tuple[int, ...]
"""The factors of one dim, major first; none where its size is one."""


class Classes:
    """Equivalence classes of factors, as a forest; each factor has a size.

    `packed` says of factors that were split into equal pieces how many these are.
    """

    def __init__(self) -> None:
        self.packed: dict[int, int] = {}
        self.parent: list[int] = []
        self.size: list[int] = []

    def new(self, size: int) -> int:
        """Add a factor of this size, in a class of its own."""
        self.parent.append(len(self.parent))
        self.size.append(size)
        return len(self.parent) - 1

    def find(self, node: int) -> int:
        """The representative of the class of `node`."""
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, a: Nodes, b: Nodes) -> None:
        """Merge the classes of two dims' factors pairwise; if one side has fewer, the major ones."""
        for x, y in zip(a, b, strict=False):
            x, y = self.find(x), self.find(y)
            if x != y:
                self.parent[max(x, y)] = min(x, y)


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter in a matmul or a look-up, in a module: which of its dims are summed over, and which are left.

    `indices` are the factors, in a `ModelTrace` the classes, of the positions at which rows were looked up; None in a
    matmul.
    """

    parameter: str
    module: str
    summed: tuple[int, ...]
    left: tuple[int, ...]
    indices: Nodes | None = None


class TracedDim(NamedTuple):
    """A dim of a traced tensor: the class and the size of its major factor; None and 1 where its size is one."""

    group: int | None
    size: int


Dims: TypeAlias = tuple[TracedDim, ...]


@dataclass(frozen=True, slots=True)
class ExpertClasses:
    """The classes, and while a model is traced the factors, of layers of experts, and the modules that run these.

    `inner` are features within an expert that a mesh axis may shard; `each` are the dims of the experts of a token.
    """

    experts: set[int] = field(default_factory=set)
    inner: set[int] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    each: set[int] = field(default_factory=set)

    def note(self, rule: Rule, by_factor: Mapping[str, Nodes], module: str) -> None:
        """Note the factor of experts of a layer in this module, and those within each that leave partial sums."""
        assert rule.chosen is not None
        self.modules.add(module)
        made = {name for term in rule.outputs for dim in term for name in dim}
        for name, nodes in by_factor.items():
            if name == rule.chosen.parts:
                self.experts.update(nodes)
            elif name == rule.chosen.each:
                self.each.update(nodes)
            elif name not in made and name not in rule.unsharded:
                self.inner.update(nodes)

    def joined(self, classes: Classes) -> ExpertClasses:
        """The classes of the factors."""
        experts, inner, each = ({*map(classes.find, own)} for own in (self.experts, self.inner, self.each))
        return ExpertClasses(experts, inner, self.modules, each)


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """A traced forward pass as a value: the classes of all dims, and how parameters and modules were used.

    `parameters` are the dims of each parameter, `uses` its uses; `outputs` and `shapes` the dims, and the shape and
    itemsize, of module outputs, `inputs` the dims of the model's; `first_inputs` the id of the first argument of each
    module; `order` the modules in the order in which they began; `answers` the host values that the pass read, None if
    it ran on data; `heads` the number of heads of each attention; `parts` each factor as a dim, and whether views
    made it the major part of one; `experts` what layers of experts have. `packed` are the dims that were split into
    equal pieces, with the number of these; `calls` the operators.
    """

    parameters: dict[str, Dims]
    uses: list[Use]
    outputs: dict[str, Dims]
    inputs: list[Dims]
    first_inputs: dict[str, int]
    order: list[str]
    shapes: dict[str, tuple[tuple[int, ...], int]]
    answers: list[Any] | None
    heads: list[int]
    parts: list[tuple[TracedDim, bool]]
    experts: ExpertClasses
    packed: dict[TracedDim, int]
    calls: TracedCalls = ()


class Tracer:
    """Joins the factors of each operator's tensors as its rule says, and notes how parameters and modules are used.

    Its attributes are those of a `ModelTrace`, in factors, whose classes are not known before the pass has ended.
    `names` are the names of parameters, and of views of them, by the ids of tensors; `majors` the factors of which
    views made the major part of a dim; `modules` those that run.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.classes, self.majors, self.dims = Classes(), set[int](), dict[int, tuple[Nodes, ...]]()
        self.kept, self.modules = list[object](), list[str]()
        self.uses, self.heads, self.order = list[Use](), list[int](), list[str]()
        self.outputs, self.inputs = dict[str, tuple[Nodes, ...]](), list[tuple[Nodes, ...]]()
        self.first_inputs, self.shapes = dict[str, int](), dict[str, tuple[tuple[int, ...], int]]()
        self.experts = ExpertClasses()
        self.names = {id(p): name for name, p in parameters.items()}
        self.parameters = {name: self.nodes(p) for name, p in parameters.items()}

    def ended(self, answers: list[Any] | None) -> ModelTrace:
        """The trace, once the pass has ended."""
        classes, experts = self.classes, self.experts
        of = [TracedDim(classes.find(node), size) for node, size in enumerate(classes.size)]
        one = TracedDim(None, 1)

        def dims(of_tensor: tuple[Nodes, ...]) -> Dims:
            return tuple([of[nodes[0]] if nodes else one for nodes in of_tensor])

        def resolved(use: Use) -> Use:
            return replace(use, indices=use.indices and tuple(classes.find(node) for node in use.indices))

        return ModelTrace(
            {name: dims(nodes) for name, nodes in self.parameters.items()},
            [resolved(use) for use in self.uses],
            {name: dims(nodes) for name, nodes in self.outputs.items()},
            [dims(nodes) for nodes in self.inputs],
            self.first_inputs,
            self.order,
            self.shapes,
            answers,
            self.heads,
            [(dim, node in self.majors) for node, dim in enumerate(of)],
            experts.joined(classes),
            {of[node]: n for node, n in classes.packed.items()},
        )

    def nodes(self, x: Tensor) -> tuple[Nodes, ...]:
        """The factors of each dim of `x`."""
        dims = self.dims.get(id(x))
        if dims is None:
            dims = tuple(() if n == 1 else (self.classes.new(n),) for n in x.shape)
            self.give(x, dims)
        return dims

    def give(self, x: Tensor, nodes: tuple[Nodes, ...]) -> None:
        """Note the factors of each dim of `x`."""
        self.dims[id(x)] = nodes
        self.kept.append(x)  # so that its id stays its own

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator without data, and join the factors of its tensors."""
        op, tensors = find(func), tensors_in((args, kwargs))
        if are_mixed(tensors):
            args, kwargs = replace_tensors((args, kwargs), _abstract)  # constants of the model, too
            tensors = tensors_in((args, kwargs))
        if op is None and tensors:
            function = DECOMPOSITIONS.get(func) or decomposition_of(func)
            if function is not None:
                with OperatorMode(self.run):
                    out = function(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        out = with_meta_form(func)(*args, **kwargs)
        outs = tensors_in(out)
        if tensors and outs and out is not args[0]:
            rule = None if op is None else _rule(op.rule, func, (args, kwargs), tensors, outs)
            self.join(rule, tensors, outs)
            self._pack(tensors, outs)
        return out

    def join(self, rule: Rule | None, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Join the factors of an operator's tensors by its rule; dims without a factor join by position."""
        inputs: tuple[Term, ...] = tuple(((),) * t.dim() for t in tensors)
        outputs: tuple[Term, ...] = tuple(((),) * t.dim() for t in outs)
        by_factor: dict[str, Nodes] = {}
        if rule is not None and len(rule.inputs) == len(tensors) and len(rule.outputs) == len(outs):
            inputs, outputs = rule.inputs, rule.outputs
            sizes = dict(factor_sizes((*inputs, *outputs), [tuple(t.shape) for t in (*tensors, *outs)], rule))
            sizes |= dict(rule.sizes)
            for term, t in zip(inputs, tensors, strict=True):
                for factors, nodes in zip(term, self.nodes(t), strict=True):
                    if rule.blocks and nodes and factors[:1] and factors[0] in rule.blocks:
                        self.classes.packed.setdefault(nodes[0], sizes[factors[0]])
                        factors = factors[1:]
                    self._read(factors, nodes, sizes, by_factor)
            if rule.chosen is not None:
                self.experts.note(rule, by_factor, self.modules[-1])
            for term, t in zip(inputs, tensors, strict=True) if rule.chosen is None else ():
                self._use(term, t, tensors, outputs)
        for term, out in zip(outputs, outs, strict=True):
            self.give(out, tuple(self._made(term, i, out, tensors, inputs, by_factor) for i in range(out.dim())))
        self._follow(tensors, outs)

    def _pack(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Note the dim of a tensor that was split into equal pieces."""
        (x, *others), n = tensors, len(outs)
        if others or n < 2 or any(out.shape != outs[0].shape or out.dim() != x.dim() for out in outs):
            return
        split = [dim for dim, size in enumerate(x.shape) if size == n * outs[0].shape[dim] and size]
        if len(split) == 1 and len(self.nodes(x)[split[0]]) == 1:
            self.classes.packed.setdefault(self.nodes(x)[split[0]][0], n)

    def _read(
        self, factors: Sequence[str], nodes: Nodes, sizes: Mapping[str, int], by_factor: dict[str, Nodes]
    ) -> None:
        """Assign the nodes of a dim to the factors of its term: one each if the sizes agree, else new ones."""
        factors = [f for f in factors if sizes.get(f, 2) != 1]
        if not factors or not nodes:
            return
        classes = self.classes
        if len(factors) == 1:
            parts = [nodes]
        elif [sizes.get(f) for f in factors] == [classes.size[n] for n in nodes]:
            parts = [(n,) for n in nodes]
        else:
            parts = [(classes.new(sizes.get(f, 0)),) for f in factors]
            classes.join(parts[0], nodes)
            self.majors.update(parts[0])
        for factor, part in zip(factors, parts, strict=True):
            if factor in by_factor:
                self.classes.join(by_factor[factor], part)
            else:
                by_factor[factor] = part

    def _made(
        self,
        term: Term,
        i: int,
        out: Tensor,
        tensors: Sequence[Tensor],
        inputs: Sequence[Term],
        by_factor: Mapping[str, Nodes],
    ) -> Nodes:
        if out.shape[i] == 1:
            return ()
        nodes = tuple(n for factor in term[i] for n in by_factor.get(factor, ()))
        if nodes:
            return nodes
        if not term[i]:
            for t, dims in zip(tensors, inputs, strict=True):
                if t.dim() == out.dim() and not dims[i] and t.shape[i] != 1:
                    return self.nodes(t)[i]
        return (self.classes.new(out.shape[i]),)

    def _use(self, term: Term, t: Tensor, tensors: Sequence[Tensor], outputs: Sequence[Term]) -> None:
        """Note the dims of a parameter, or of a view of one, that a matmul or a look-up sums over."""
        name = self.names.get(id(t))
        if name is None or len(tensors) < 2:
            return
        factors = {factor for out in outputs for dim in out for factor in dim}
        own = self.parameters[name]
        dims = [
            (own.index(n), bool(set(dim) & factors))
            for dim, n in zip(term, self.nodes(t), strict=True)
            if n in own and dim
        ]
        summed, left = (tuple(i for i, stays in dims if stays is in_output) for in_output in (False, True))
        positions = next((x for x in tensors if not x.is_floating_point()), None)
        indices = None if positions is None else tuple(n for dim in self.nodes(positions) for n in dim)
        if summed:
            self.uses.append(Use(name, self.modules[-1], summed, left, indices))

    def _follow(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Name views of a parameter, and rows chosen from it, after the parameter."""
        name = self.names.get(id(tensors[0]))
        if name is None:
            return
        own = {nodes for nodes in self.parameters[name] if nodes}
        for out in outs:
            if len(own & set(self.nodes(out))) >= min(2, len(own)):
                self.names[id(out)] = name


def _rule(
    of: Callable[[Call], Rule], func: OpOverload, operands: Any, tensors: Sequence[Tensor], outs: Any
) -> Rule | None:
    specs = tuple(specs_of([ONE] * len(tensors), tensors, tensors[0].device))
    spec_args, spec_kwargs = with_tensors(operands, specs)
    return of(Call(func, spec_args, spec_kwargs, specs, tuple(outs)))


@plain()
@disable_modes()
def trace_factors(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], reached: ReachableState | None = None
) -> ModelTrace:
    """Run the forward pass of `model` without data, or on copies if it needs data; nothing of what it writes stays.

    `reached` is the state that the model and the batch lead to, for callers that have it.
    """
    reached = reached or ReachableState(model, args, kwargs)
    try:
        return _traced(model, args, kwargs, reached, without_data)
    except Exception as error:
        if all(type(x) in (Tensor, nn.Parameter) and not has_only_shape(x) for x in reached.tensors):
            return replace(_traced(model, args, kwargs, reached, torch.clone), answers=None)
        if not isinstance(error, NotImplementedError | RuntimeError) or isinstance(error, LayoutError):
            raise
        if "meta" not in str(error).lower():
            raise
        raise LayoutError(
            f"the forward pass of {type(model).__name__} does not run without data ({str(error).partition('. ')[0]}): "
            "give a model and an example with data, or the placements of its parameters by name, {pattern: placements}"
        ) from error


def _traced(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    reached: ReachableState,
    stand_in: Callable[[Tensor], Tensor],
) -> ModelTrace:
    """Run the forward pass of `model` on stand-ins of all tensors that it and the batch lead to."""
    stand_ins = {id(x): stand_in_for(x, stand_in) for x in reached.tensors}
    parameters = {name: stand_ins[id(p)] for name, p in model.named_parameters()}
    tracer = Tracer(parameters)
    example = named_inputs(model, tuple(args), kwargs)
    args, kwargs = map_tensors((tuple(args), dict(kwargs)), lambda x: stand_in(x.detach()))
    inputs = nested_tensors((args, kwargs))
    tracer.inputs = [tracer.nodes(t) for t in inputs]
    of_inputs = [(x, data, name) for x, (data, name) in zip(inputs, example, strict=True)]
    known = [*((stand_ins[id(x)], x, None) for x in reached.tensors), *of_inputs]
    values = ForwardValues(model, known, lambda *call: tracer.heads.extend(_heads_of(*call)))
    calls: list[tuple[str, Hashable]] = []
    run, told = (tracer.run, nullcontext()) if stand_in is without_data else _outside_bodies(tracer)

    def called(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        calls.append((tracer.modules[-1] if tracer.modules else "", (func, _shapes_in((args, kwargs)))))
        return run(func, args, kwargs)

    with (
        reached.replaced(stand_ins),
        experts_as_operators(model),
        OF_WHOLE_LOGITS.entered(None),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        for name, module in model.named_modules():
            _follow(tracer, name, module)
        with OperatorMode(called), values, told:
            model(*args, **kwargs)
    return replace(tracer.ended(values.answers), calls=calls)


def _shapes_in(value: object) -> Hashable:
    """The arguments of a call, but for values in tensors and in what only has a class of its own."""
    match value:
        case Tensor():
            return tuple(value.shape), value.dtype, value.requires_grad
        case list() | tuple():
            return tuple([_shapes_in(each) for each in value])
        case dict():
            return tuple([(name, _shapes_in(each)) for name, each in value.items()])
        case None | bool() | int() | float() | str() | torch.dtype():
            return value
        case _:
            return type(value).__qualname__


def _outside_bodies(tracer: Tracer) -> tuple[Callable[[Any, Args, Kwargs], Any], AbstractContextManager[object]]:
    """How operators run within a block, so that there a layer of experts that runs on data counts as one operator."""
    running: list[object] = []

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        return func(*args, **kwargs) if running else tracer.run(func, args, kwargs)

    def found(call: object) -> None:
        if isinstance(call, PlainExperts):
            running[:] = [call] if call.out is None else []
            if call.out is not None:
                tracer.join(call.rule, call.operands, [call.out])

    return run, observing(_unseen, found=found)


def _unseen(decision: object) -> None:
    """The observer of decisions: on plain tensors there are none."""


_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


def _heads_of(func: Function, args: Args, kwargs: Kwargs) -> Sequence[int]:
    """The number of heads of an attention, or of a matmul that may be attention written as matmuls; of others none."""
    if func is F.scaled_dot_product_attention:
        query = args[0] if args else kwargs["query"]
        return [query.shape[-3] if query.dim() > 2 else 1]
    if func in _PRODUCTS and all(isinstance(x, Tensor) and x.dim() > 3 for x in args):
        return [*{args[0].shape[-3]} & {args[1].shape[-3]}]
    return ()


def _abstract(x: Tensor) -> Tensor:
    return x if has_only_shape(x) else without_data(x)


def without_data(x: Tensor) -> Tensor:
    """A plain meta tensor with the global shape, strides and dtype of `x`."""
    return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")


def stand_in_for(x: Tensor, stand_in: Callable[[Tensor], Tensor] = without_data) -> Tensor:
    """`stand_in(x)` for a tensor that a model holds: a parameter if `x` is one, with its attributes."""
    is_own = isinstance(x, Wrapper)  # whose layout is dshard's
    if not is_own and (x.layout != torch.strided or x.is_nested or x.is_quantized):
        return x
    out = stand_in(x.detach())
    out = nn.Parameter(out, x.requires_grad) if isinstance(x, nn.Parameter) else out.requires_grad_(x.requires_grad)
    if not is_own:
        vars(out).update(vars(x))
    return out


def _follow(tracer: Tracer, name: str, module: nn.Module) -> None:
    """Register hooks by which the tracer knows the module that runs, its input and its output."""

    def enter(module: nn.Module, args: Any) -> None:
        tracer.modules.append(name)
        if name not in tracer.order:
            tracer.order.append(name)
        if args and isinstance(args[0], Tensor):
            with no_functions():  # the model has not asked for its shape
                tracer.nodes(args[0])
            tracer.first_inputs[name] = id(args[0])

    def leave(module: nn.Module, args: object, out: object) -> None:
        tracer.modules.pop()
        if isinstance(out, Tensor):
            with no_functions():
                tracer.outputs[name] = tracer.nodes(out)
                tracer.shapes[name] = tuple(out.shape), out.itemsize

    if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
