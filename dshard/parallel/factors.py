"""Factors that dims of parameters and activations share, read from a run of a module on tensors without data.

Every operator's rule says which dims of its tensors carry the same factor. Joined over all operators of a forward pass,
factors become classes: the batch, the features of the residual stream, the heads of an attention, the vocabulary. No
class of `nn.Module` is known by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import NamedTuple, TypeAlias

from torch import Tag, nn

from dshard.parallel.reachable_state import ReachableState
from dshard.parallel.trace_step import RecordedStep, record_step
from dshard.planning.step_graph import Value
from dshard.planning.step_recorder import GraphRecorder
from dshard.rules.rule import Rule, Term, factor_sizes

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
    itemsize, of module outputs, `inputs` the dims of the model's; `first_inputs` the number of the value that is the
    first argument of each module; `order` the modules in the order in which they began; `heads` the dims and number of
    heads of each attention; `parts` each factor as a dim, and whether views made it the major part of one; `experts`
    what layers of experts have. `packed` are the dims that were split into equal pieces, with the number of these;
    `step` is the pass as it was recorded.
    """

    parameters: dict[str, Dims]
    uses: list[Use]
    outputs: dict[str, Dims]
    inputs: list[Dims]
    first_inputs: dict[str, int]
    order: list[str]
    shapes: dict[str, tuple[tuple[int, ...], int]]
    heads: list[tuple[int, int]]
    parts: list[tuple[TracedDim, bool]]
    experts: ExpertClasses
    packed: dict[TracedDim, int]
    step: RecordedStep


class FactorClasses:
    """Joins the factors of the calls of a recorded pass as their rules say, and notes how parameters are used.

    Its attributes are those of a `ModelTrace`, in factors, whose classes are not known before all calls are joined.
    Values have their numbers; `names` are the names of parameters, and of views of them. `cuts` are the factors that
    views made of a dim, with those that it had; `majors` the first of the former, in dims that are one block. `taken`
    says how many results have one index of a factor each; `grown` are those of which `cat` joined several.
    """

    def __init__(self, values: Sequence[Value]) -> None:
        self.classes, self.majors, self.dims = Classes(), set[int](), dict[int, tuple[Nodes, ...]]()
        self.shapes = [value.shape for value in values]
        self.is_floating = [value.dtype.is_floating_point for value in values]
        self.uses, self.experts = list[Use](), ExpertClasses()
        self.cuts, self.taken, self.grown = list[tuple[Nodes, Nodes]](), Counter[int](), set[int]()
        self.names = {value.number: value.name for value in values if value.kind == "parameter"}
        self.parameters = {name: self.nodes(number) for number, name in self.names.items()}

    def join_recorded(self, recorder: GraphRecorder) -> None:
        """Join the factors of all operators of a recorded pass."""
        for each in recorder.operators:
            operands, results = each.operands, each.results
            is_written = recorder.tensors[results[0]] is recorder.tensors[operands[0]]
            if is_written and Tag.inplace_view not in getattr(each.function, "tags", ()):  # its dims are the same
                self.dims[results[0]] = self.nodes(operands[0])
            else:
                self.join(each.rule, each.place.module, operands, results)
        self._join_cuts()

    def _join_cuts(self) -> None:
        """Join each dim that a view cut with the part that may be sharded: the major one behind its blocks.

        The latest cuts come first, as they say whether parts of earlier ones are packed.
        """
        for parts, nodes in reversed(self.cuts):
            blocks, part = self._blocks(parts)
            self.classes.join((part,), nodes)
            if blocks == 1:
                self.majors.add(part)
                continue
            whole, size = nodes[0], prod([self.classes.size[node] for node in parts])
            if len(nodes) == 1 and self.classes.size[whole] < size:  # a bias that `cat` joined is named first
                whole = self.classes.new(size)
                self.classes.join((whole,), nodes)
            if size >= self.classes.size[whole] and self.classes.size[whole] % blocks == 0:
                self.classes.packed.setdefault(whole, blocks)

    def _blocks(self, parts: Nodes) -> tuple[int, int]:
        """The number of blocks that a dim cut into these parts has, and the part within each.

        That is one that a matmul contracts with a parameter, as a projection does heads, unless `cat` joins several of
        them for that, such as features of heads that are computed one by one; or the dim is one block.
        """
        if parts[0] not in self.classes.packed and not self._is_unpacked(parts[0]):
            return 1, parts[0]
        classes = self.classes
        uses = [(self.parameters[use.parameter], use.summed) for use in self.uses if use.indices is None]
        contracted = {classes.find(node) for dims, summed in uses for i in summed for node in dims[i]}
        blocks = 1
        for part in parts:
            if part in self.grown:
                break
            if classes.find(part) in contracted:
                return blocks * self.classes.packed.get(part, 1), part
            if not self._is_unpacked(part):
                break
            blocks *= classes.size[part]
        return 1, parts[0]

    def _is_unpacked(self, node: int) -> bool:
        """Whether each index of a factor is taken alone, by `unbind`, by selecting or by pieces of one entry.

        It may be taken of another value whose dim has the factor, such as a sum with a table of shifts.
        """
        classes = self.classes
        size, group = classes.size[node], classes.find(node)
        counts = (*self.taken.items(), *classes.packed.items())
        return size > 1 and any(n >= size == classes.size[of] and classes.find(of) == group for of, n in counts)

    def nodes(self, number: int) -> tuple[Nodes, ...]:
        """The factors of each dim of a value."""
        dims = self.dims.get(number)
        if dims is None:
            dims = tuple(() if n == 1 else (self.classes.new(n),) for n in self.shapes[number])
            self.dims[number] = dims
        return dims

    def join(self, rule: Rule, module: str, operands: Sequence[int], results: Sequence[int]) -> None:
        """Join the factors of a call's values by its rule; dims without a factor join by position."""
        shapes, by_factor = [self.shapes[n] for n in (*operands, *results)], dict[str, Nodes]()
        sizes = factor_sizes((*rule.inputs, *rule.outputs), shapes, rule) | dict(rule.sizes)
        for term, n in zip(rule.inputs, operands, strict=True):
            for factors, nodes in zip(term, self.nodes(n), strict=True):
                if rule.blocks and nodes and factors[:1] and factors[0] in rule.blocks:
                    self.classes.packed.setdefault(nodes[0], sizes[factors[0]])
                    factors = factors[1:]
                self._read(factors, nodes, sizes, by_factor)
        is_product = False
        if rule.chosen is not None:
            self.experts.note(rule, by_factor, module)
        else:
            is_product = self._note_uses(rule, module, operands)
        for term, n in zip(rule.outputs, results, strict=True):
            made = [self._made(term, i, n, operands, rule, by_factor) for i in range(len(term))]
            self.dims[n] = tuple(made)
        if not is_product:
            self._follow(operands, results)
        self._pack(operands, results)
        self._take(rule, operands, results)

    def _take(self, rule: Rule, operands: Sequence[int], results: Sequence[int]) -> None:
        """Count results that have one index of a dim, which they lack; a sum over the dim is one result of many."""
        shape, kept = self.shapes[operands[0]] if operands else (), {*chain.from_iterable(rule.outputs)}
        if len(operands) != 1 or not all(len(self.shapes[n]) == len(shape) - 1 for n in results):
            return
        gone = [i for i, dim in enumerate(rule.inputs[0]) if dim not in kept and shape[i] > 1]
        if len(gone) == 1 and len(self.nodes(operands[0])[gone[0]]) == 1:
            self.taken[self.nodes(operands[0])[gone[0]][0]] += len(results)

    def _pack(self, operands: Sequence[int], results: Sequence[int]) -> None:
        """Note the dim of a value that was split into equal pieces."""
        x, n, shape = operands[0], len(results), self.shapes[results[0]]
        if (
            len(operands) > 1
            or n < 2
            or len(shape) != len(self.shapes[x])
            or len({self.shapes[i] for i in results}) > 1
        ):
            return
        split = [dim for dim, size in enumerate(self.shapes[x]) if size == n * shape[dim] and size]
        if len(split) == 1 and len(self.nodes(x)[split[0]]) == 1:
            (node,), size = self.nodes(x)[split[0]], self.shapes[x][split[0]]
            if self.classes.size[node] != size:  # of one of the values that `cat` joined, each of which is one piece
                whole = self.classes.new(size)
                self.classes.join((whole,), (node,))
                node = whole
            self.classes.packed.setdefault(node, n)

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
            self.cuts.append((tuple([node for (node,) in parts]), nodes))
        for factor, part in zip(factors, parts, strict=True):
            if factor in by_factor:
                self.classes.join(by_factor[factor], part)
            else:
                by_factor[factor] = part

    def _made(
        self, term: Term, i: int, result: int, operands: Sequence[int], rule: Rule, by_factor: Mapping[str, Nodes]
    ) -> Nodes:
        """The factors of dim `i` of a result."""
        shape = self.shapes[result]
        if shape[i] == 1:
            return ()
        nodes = tuple(n for factor in term[i] for n in by_factor.get(factor, ()))
        if nodes:
            return nodes
        if not term[i]:
            for n, dims in zip(operands, rule.inputs, strict=True):
                if len(dims) == len(shape) and not dims[i] and self.shapes[n][i] != 1:
                    nodes = self.nodes(n)[i]
                    self.grown.update(nodes if self.shapes[n][i] < shape[i] else ())
                    break
        return nodes or (self.classes.new(shape[i]),)

    def _note_uses(self, rule: Rule, module: str, operands: Sequence[int]) -> bool:
        """Note the dims of parameters, or of views of them, that a matmul or a look-up sums over.

        A dim of a view may be several of the parameter. Returns whether the call is a matmul of a parameter.
        """
        factors = {factor for out in rule.outputs for dim in out for factor in dim}
        is_product = False
        for term, n in zip(rule.inputs, operands, strict=True):
            name = self.names.get(n)
            if name is None or len(operands) < 2:
                continue
            own = self._dims_of(name)
            dims = [
                (own[node], bool(set(dim) & factors))
                for dim, nodes in zip(term, self.nodes(n), strict=True)
                for node in nodes
                if node in own and dim
            ]
            summed, left = (tuple(i for i, stays in dims if stays is in_output) for in_output in (False, True))
            positions = next((x for x in operands if not self.is_floating[x]), None)
            indices = None if positions is None else tuple(node for dim in self.nodes(positions) for node in dim)
            if summed:
                self.uses.append(Use(name, module, summed, left, indices))
                is_product = is_product or indices is None
        return is_product

    def _follow(self, operands: Sequence[int], results: Sequence[int]) -> None:
        """Name views of a parameter, and rows chosen from it, after the parameter."""
        name = self.names.get(operands[0])
        if name is None:
            return
        own = self._dims_of(name).keys()
        for n in results:
            if len(own & set(chain.from_iterable(self.nodes(n)))) >= min(2, len(own)):
                self.names[n] = name

    def _dims_of(self, name: str) -> dict[int, int]:
        """The dim of a parameter that has each factor."""
        return {node: dim for dim, nodes in enumerate(self.parameters[name]) for node in nodes}


def trace_factors(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], reached: ReachableState | None = None
) -> ModelTrace:
    """The trace of a forward pass of `model`, which `record_step` runs and records.

    `reached` is the state that the model and the batch lead to, for callers that have it.

    Raises:
        LayoutError: a pass that does not run without data, of a model or a batch that has none.
    """
    return _traced(record_step(model, args, kwargs, reached))


def _traced(step: RecordedStep) -> ModelTrace:
    """The trace of a recorded forward pass."""
    recorder, ran = step.recorder, step.recorder.modules
    factors = FactorClasses(recorder.values)
    factors.join_recorded(recorder)
    classes, experts = factors.classes, factors.experts
    inputs = [factors.nodes(x.number) for x in recorder.values if x.kind == "input"]
    outputs = {name: factors.nodes(number) for name, number in ran.outputs.items()}
    of = [TracedDim(classes.find(node), size) for node, size in enumerate(classes.size)]
    one = TracedDim(None, 1)

    def dims(of_tensor: tuple[Nodes, ...]) -> Dims:
        return tuple([of[nodes[0]] if nodes else one for nodes in of_tensor])

    def resolved(use: Use) -> Use:
        return replace(use, indices=use.indices and tuple(classes.find(node) for node in use.indices))

    return ModelTrace(
        {name: dims(nodes) for name, nodes in factors.parameters.items()},
        [resolved(use) for use in factors.uses],
        {name: dims(nodes) for name, nodes in outputs.items()},
        [dims(nodes) for nodes in inputs],
        ran.first_inputs,
        [*ran.visits],
        {name: (recorder.values[n].shape, recorder.values[n].dtype.itemsize) for name, n in ran.outputs.items()},
        recorder.heads,
        [(dim, node in factors.majors) for node, dim in enumerate(of)],
        experts.joined(classes),
        {of[node]: n for node, n in classes.packed.items()},
        step,
    )
