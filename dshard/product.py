"""Products of two distributed tensors, forward and backward from one plan.

A product is its rule; which loop each mesh axis takes is its strategy. The gradients of its operands are products, too,
of the same factors on the same axes, with the roles exchanged: what moved in one may be moved in another, and a tensor
gathered going forward is reduced going back. They are made by the same function, so second derivatives work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.autograd import distributed, left_pending, redistribute
from dshard.comm import LocalTensor, Program, Session, perform, run, runner, runtime_of, traced
from dshard.dispatch import SEEN, common_mesh
from dshard.layout import Layout, replicated
from dshard.mesh import Coordinate
from dshard.ops.expand import Operand, Order, Row, expand, sizes_of
from dshard.ops.matmul.asked import NOTHING, Asked
from dshard.ops.matmul.local import LocalProduct, local_product
from dshard.ops.matmul.priced import Panelled, cheapest, in_panels
from dshard.ops.matmul.refine import Cut, cut_contraction
from dshard.ops.matmul.ring import executor
from dshard.ops.matmul.rules import same_dtype
from dshard.ops.matmul.stream import Auto, Stream
from dshard.ops.matmul.streamed import Streamed
from dshard.ops.moving import coordinate_of, run_on_ranks
from dshard.ops.observe import OBSERVERS, Decision, observed
from dshard.ops.rule import Pending, Rule
from dshard.ops.settings import current
from dshard.ops.spec import Spec, contiguous_stride, spec_of
from dshard.ops.strategy import Strategy, Wanted, choose
from dshard.placements import Partial
from dshard.redistribute import Pend, Plan, Slice, plan

NEITHER = (False, False)
Infer: TypeAlias = Callable[..., Tensor]


class Product:
    """One product of operands of given specs, decided: how they move, what is multiplied, where the result lies."""

    def __init__(
        self,
        name: str,
        rule: Rule,
        specs: tuple[Spec, Spec],
        bias: Spec | None,
        out: Spec,
        strategy: Strategy,
        wanted: Wanted,
        cut: Cut | None = None,
        stream: Stream | Auto | None = None,
    ) -> None:
        self.name, self.rule, self.specs, self.bias, self.out = name, rule, specs, bias, out
        self.strategy, self.wanted, self.cut, self.stream = strategy, wanted, cut, stream
        self.mesh = specs[0].layout.mesh
        self.plans = tuple(_plan(spec, layout) for spec, layout in zip(specs, strategy.inputs, strict=True))
        computed = out.with_layout(strategy.outputs[0])
        self.end = _plan(computed, out.layout)
        self.kernel: LocalProduct = local_product(*rule.inputs, *rule.outputs)
        self.kept = tuple(keep and sends(p) for keep, p in zip(wanted.kept, self.plans, strict=True))
        self.bias_plan = None if bias is None else _plan(bias, self.bias_layout())
        self.cotangent = out.layout.cotangent()
        self.priced: tuple[Panelled, ...] | None = None
        self.streamed = self._streamed()
        if self.streamed is not None:
            self.kept = NEITHER
        self.beside: Streamed | None = None
        self.warm: Callable[..., Tensor] | None = None
        self.gradients: dict[tuple[Any, ...], Product] = {}
        self.backs: dict[tuple[Any, ...], Back | None] = {}

    def _streamed(self) -> Streamed | None:
        """The executor in panels, where they are asked for and anything moves."""
        if self.stream is None or not any(sends(p) for p in (*self.plans, self.end)):
            return None
        plans = self.plans[0], self.plans[1], self.end
        stream = self.stream
        if isinstance(stream, Auto):
            panels = cheapest(self.in_panels(), stream.limit).panels
            if panels == 1:
                return None
            stream = Stream(panels)
        return executor(self.rule, plans, self.out.dtype, stream, self.bias_plan)

    def in_panels(self) -> tuple[Panelled, ...]:
        """What it takes in each of the numbers of panels worth trying; priced once."""
        if self.priced is None:
            plans = self.plans[0], self.plans[1], self.end
            self.priced = in_panels(self.rule, plans, self.out.dtype, current().topology_of(self.mesh))
        return self.priced

    def overlaps(self) -> bool:
        """Whether its result is reduced beside the next product; not if that could share a moved first operand."""
        return sends(self.end) and (self.streamed is not None or not self.plans[0].steps)

    def executor(self) -> Streamed:
        """What runs the product in panels, or whole, beside others."""
        if self.streamed is not None:
            return self.streamed
        if self.beside is None:
            plans = self.plans[0], self.plans[1], self.end
            self.beside = Streamed(self.rule, plans, self.out.dtype, Stream(1), self.bias_plan)
        return self.beside

    def bias_layout(self) -> Layout:
        """Where a bias along the last dim of the result must lie to be added to a rank's part."""
        assert self.bias is not None
        last = (self.rule.outputs[0][-1],)
        rule = Rule((*self.rule.inputs, last), self.rule.outputs, pending=self.rule.pending)
        operands = [Operand(s.layout, s.shape, s.itemsize) for s in (*self.specs, self.bias)]
        sizes = sizes_of(rule, operands, [(self.out.shape, self.out.itemsize)])
        found = expand(rule, operands, self.strategy.rows, self.strategy.order, sizes)
        assert found is not None
        return found.inputs[2]

    def local(self, coordinate: Coordinate) -> Callable[..., Tensor]:
        """What the rank at `coordinate` computes of its parts: of a result left pending, one rank adds the bias."""
        kernel = self.kernel
        if self.bias is None:
            return kernel
        pending = self.strategy.outputs[0].placements
        if any(p == Partial() and coordinate[axis] for axis, p in enumerate(pending)):
            return lambda a, b, bias: kernel(a, b)
        if kernel is F.linear:
            return F.linear
        return lambda a, b, bias: kernel(a, b) + bias

    def __call__(self, tensors: Sequence[Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """The local result, and the two operands as they were multiplied."""
        a, b = tensors[0]._local, tensors[1]._local
        if self.streamed is not None:
            return self.streamed([t._local for t in tensors]), (a, b)
        if type(a) is LocalTensor or type(b) is LocalTensor or a.is_meta or runtime_of(self.mesh) is None:
            return self.slow(tensors)
        return self.on_local(a, b, None if self.bias is None else tensors[2]._local)

    def on_local(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Sequence[Tensor]]:
        """The same for the local parts of operands that have data and processes."""
        if self.warm is None:
            self.warm = self.local(coordinate_of(self.mesh))
            plans = (*self.plans, self.end, *([] if self.bias_plan is None else [self.bias_plan]))
            self.movers = [runner(p) if p.steps else None for p in plans]
        move_a, move_b, finish, *move_bias = self.movers
        if move_a is not None:
            a = move_a(a)
        if move_b is not None:
            b = move_b(b)
        if bias is None:
            out = self.warm(a, b)
        else:
            out = self.warm(a, b, bias if move_bias[0] is None else move_bias[0](bias))
        return (out if finish is None else finish(out)), (a, b)

    def slow(self, tensors: Sequence[Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """The same for ranks simulated in one process, or without data."""
        plans = self.plans if self.bias_plan is None else (*self.plans, self.bias_plan)
        moved = tuple(run(p, t._local) for p, t in zip(plans, tensors, strict=True))
        return run(self.end, run_on_ranks(self.mesh, self.local, moved, {})), moved[:2]

    def wrap_moved(self, cls: Any, i: int, moved: Sequence[Tensor]) -> Any:
        """Operand `i` as it was multiplied, as a distributed tensor."""
        return cls._wrap(moved[i], self.specs[i].with_layout(self.strategy.inputs[i]))

    def decision(self) -> Decision:
        """What was chosen."""
        operands = tuple(Operand(spec.layout, spec.shape, spec.itemsize) for spec in self.specs)
        outputs = ((self.out.shape, self.out.itemsize),)
        topology = current().topology_of(self.mesh)
        plans = (*self.plans, *([self.bias_plan] if self.bias_plan is not None else []), self.end)
        strategy, wanted = self.strategy, self.wanted
        return Decision(
            *(self.name, operands, outputs, self.rule, strategy, plans, topology),
            wanted=wanted,
            panels=self.in_panels,
            run_in=1 if self.streamed is None else self.streamed.stream.panels,
        )

    # -- gradients

    def gradient(self, i: int, grad: Spec, other: Spec) -> Product:
        """The product of the result's gradient and the other operand that is the gradient of operand `i`."""
        key = (i, grad, other)
        found = self.gradients.get(key)
        if found is None:
            found = self.gradients[key] = self._gradient(i, grad, other)
        return found

    def back(self, grad: Spec, a: Spec | None, b: Spec | None) -> Back | None:
        """Both gradients, of the operands whose other is given, where nothing is run beside them or conjugated."""
        key = (grad, a, b)
        if key not in self.backs:
            self.backs[key] = back_of(self, grad, a, b)
        return self.backs[key]

    def _gradient(self, i: int, grad: Spec, other: Spec) -> Product:
        (a, b), (out,) = self.rule.inputs, self.rule.outputs
        terms, specs = ((out, b), (grad, other)) if i == 0 else ((a, out), (other, grad))
        rule = Rule(terms, (self.rule.inputs[i],), pending=self.rule.pending, loops=True)
        target = self.specs[i]
        rows = tuple(_turned(row, i) for row in self.strategy.rows)
        name, order = f"{self.name} backward", self.strategy.order
        complete = not i and (isinstance(self.stream, Stream) or self.streamed is not None)
        return product_of(name, rule, specs, target, rows, order, self.stream, complete=complete)


class Back:
    """The gradients of both operands of a product, decided: two products, the second of what the first moved."""

    __slots__ = ("first", "second")

    def __init__(self, first: Product | None, second: Product | None) -> None:
        self.first, self.second = first, second

    def __call__(self, cls: Any, grad: Tensor, a: Any, b: Any) -> tuple[Any, Any]:
        """The gradients, of the local part of the result's."""
        for_a = for_b = None
        if self.first is not None:
            out, (grad, _) = self.first.on_local(grad, b._local)
            for_a = cls._wrap(out, self.first.out)
        if self.second is not None:
            for_b = cls._wrap(self.second.on_local(a._local, grad)[0], self.second.out)
        return for_a, for_b


def back_of(product: Product, grad: Spec, a: Spec | None, b: Spec | None) -> Back | None:
    """Both gradients, where nothing is run beside them or conjugated."""
    if grad.dtype.is_complex or runtime_of(product.mesh) is None:
        return None
    first = None if b is None else product.gradient(0, grad, b)
    if first is not None:
        if first.streamed is not None or (a is not None and first.overlaps()):
            return None
        grad = grad.with_layout(first.strategy.inputs[0])
    second = None if a is None else product.gradient(1, grad, a)
    return None if second is not None and second.streamed is not None else Back(first, second)


def product_of(
    name: str,
    rule: Rule,
    specs: tuple[Spec, Spec],
    like: Spec,
    rows: tuple[Row, ...],
    order: Order,
    stream: Stream | Auto | None = None,
    complete: bool = False,
) -> Product:
    """The product with these rows, its result a gradient for `like`: laid out like it, but for sums left pending.

    With `complete` none are: they are reduced at once, beside the product that comes next.
    """
    operands = [Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs]
    sizes = sizes_of(rule, operands, [(like.shape, like.itemsize)])
    found = expand(rule, operands, rows, order, sizes)
    assert found is not None, "the gradient's factors are those of the product"
    target = like.layout.cotangent()
    end = target if complete else left_pending(found.outputs[0], target)
    out = spec_of(end, like.shape, contiguous_stride(like.shape), like.dtype, like.device)
    strategy = Strategy(found.inputs, found.outputs, rows, found.gradients, (end,), order)
    if isinstance(stream, Stream):
        stream = replace(stream, axis=None)  # which loop moves most differs
    return Product(name, rule, specs, None, out, strategy, Wanted(result=end, kept=NEITHER), None, stream)


def _turned(row: Row, i: int) -> Row:
    """What an axis does in the gradient of operand `i`: an operand that was pending is so still, if it takes part."""
    if not isinstance(row, Pending):
        return row
    other = 1 - i
    return row if row.operands == frozenset({other}) else None


def sends(moves: Plan) -> bool:
    """Whether anything is communicated."""
    return any(not isinstance(step, Slice | Pend) for step in moves.steps)


def _plan(spec: Spec, layout: Layout) -> Plan:
    return plan(spec.layout, layout, spec.shape, spec.itemsize, current().topology_of(layout.mesh))


class Multiply(torch.autograd.Function):
    """A product, recorded. Saves the operands, and moved copies of those worth keeping."""

    @staticmethod
    def forward(ctx: Any, cls: Any, product: Product, *tensors: Any) -> Any:
        out, moved = product(tensors)
        ctx.cls, ctx.product = cls, product
        a, b = tensors[:2]
        need_a, need_b = ctx.needs_input_grad[3], ctx.needs_input_grad[2]
        keep_a, keep_b = product.kept
        ctx.save_for_backward(
            a if need_a else None,
            b if need_b else None,
            product.wrap_moved(cls, 0, moved) if keep_a and need_a else None,
            product.wrap_moved(cls, 1, moved) if keep_b and need_b else None,
        )
        return cls._wrap(out, product.out)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        cls, product = ctx.cls, ctx.product
        a, b, moved_a, moved_b = ctx.saved_tensors
        layout = product.cotangent
        grad = redistribute(distributed(cls, grad, layout), layout)
        plain = not torch.is_grad_enabled()
        if plain:
            a, b = (a if moved_a is None else moved_a), (b if moved_b is None else moved_b)
        a, b = (a if wanted(ctx, 1) else None), (b if wanted(ctx, 0) else None)  # each is for the other's gradient
        found: list[Any] = [None] * (2 if product.bias is None else 3)
        if product.bias is not None and wanted(ctx, 2):
            dims = len(product.out.shape) - 1
            found[2] = grad.sum(tuple(range(dims))) if dims else grad
        if plain and not OBSERVERS and type(grad._local) is Tensor and not grad._local.is_meta:
            back = product.back(grad._spec, None if a is None else a._spec, None if b is None else b._spec)
            if back is not None:
                found[:2] = back(cls, grad._local, a, b)
                return (None, None, *found)
        found[:2] = _gradients(ctx, cls, product, grad, a, b, plain)
        return (None, None, *found)


def _gradients(ctx: Any, cls: Any, product: Product, grad: Any, a: Any, b: Any, plain: bool) -> list[Any]:
    """The gradients of both operands: observed, recorded, beside each other, of complex numbers, or without data."""
    found: list[Any] = [None, None]
    need_a, need_b = wanted(ctx, 0), wanted(ctx, 1)
    if need_a:
        other: Any = torch.conj_physical(b) if b.is_complex() else b
        first = product.gradient(0, grad._spec, other._spec)
        if need_b and plain and first.overlaps() and not traced(grad._local):
            given: Any = torch.conj_physical(a) if a.is_complex() else a
            second = product.gradient(1, grad._spec, given._spec)
            found[:2] = both(cls, (first, (grad, other)), (second, (given, grad)))
            return found
        found[0], moved = multiply_keeping(cls, first, (grad, other))
        if plain and first.streamed is None:  # both products want it in one layout, so it is moved once
            grad = first.wrap_moved(cls, 0, moved)
    if need_b:
        other = torch.conj_physical(a) if a.is_complex() else a
        found[1] = multiply(cls, product.gradient(1, grad._spec, other._spec), (other, grad))
    return found


def wanted(ctx: Any, i: int) -> bool:
    """Whether the backward pass that runs has a use for the gradient of tensor `i` of a product.

    A pass that is asked for the gradients of some tensors alone goes only where those are.
    """
    if not ctx.needs_input_grad[2 + i]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[i][0]))
    except RuntimeError:  # torch does not tell of a leaf within autograd.grad, which goes there if it was asked to
        return True


def both(cls: Any, first: tuple[Product, Sequence[Any]], second: tuple[Product, Sequence[Any]]) -> list[Any]:
    """Two products, of which the second is computed while the result of the first is reduced."""
    run: Callable[..., Any] = _both
    args: tuple[Any, ...] = (cls, first, second)
    if OBSERVERS:
        for product, _ in (first, second):
            run, args = observed, (product.decision(), run, args)
    return run(*args)  # type: ignore[no-any-return]


def _both(cls: Any, first: tuple[Product, Sequence[Any]], second: tuple[Product, Sequence[Any]]) -> list[Any]:
    programs = [product.executor().program for product, _ in (first, second)]
    n = len(first[1])

    def program(at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[tuple[Tensor, ...]]:
        rest = yield from programs[0](at, space, tensors[:n])
        other = yield from (yield from programs[1](at, space, tensors[n:]))
        return (yield from rest), other

    tensors = [t._local for _, given in (first, second) for t in given]
    plans = [p for product, _ in (first, second) for p in (*product.plans, product.end)]
    found = perform(first[0].mesh, program, tensors, plans)
    return [cls._wrap(x, product.out) for x, (product, _) in zip(found, (first, second), strict=True)]


def multiply(cls: Any, product: Product, tensors: Sequence[Any]) -> Any:
    """The product of these distributed tensors."""
    return multiply_keeping(cls, product, tensors)[0]


def multiply_keeping(cls: Any, product: Product, tensors: Sequence[Any]) -> tuple[Any, Sequence[Tensor]]:
    """The same, and the local operands as they were multiplied where no gradient is recorded."""
    cut = product.cut
    if cut is not None:
        (a, b, *bias), (dim_a, dim_b) = tensors, cut.dims
        tensors = (a.unflatten(dim_a, cut.sizes), b.unflatten(dim_b, cut.sizes), *bias)
    if OBSERVERS:
        found: tuple[Any, Sequence[Tensor]] = observed(product.decision(), _multiply, (cls, product, tensors))
        return found
    out = _multiply(cls, product, tensors)
    if SEEN and cut is None:
        for seen in SEEN:
            seen.append((product, None, tuple(tensors), {}, out[0]))
    return out


def _multiply(cls: Any, product: Product, tensors: Sequence[Any]) -> tuple[Any, Sequence[Tensor]]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return Multiply.apply(cls, product, *tensors), ()  # type: ignore[no-untyped-call]
    out, moved = product(tensors)
    return cls._wrap(out, product.out), moved


def decide(
    cls: Any, name: str, rule: Callable[[], Rule], infer: Infer, tensors: Sequence[Any], asked: Asked, key: Any = None
) -> Product:
    """The cheapest product of these tensors that is as `asked`; looked up where it was decided before.

    `infer` gives the result without data, or torch's own error; `key` tells rules of one name and shape apart.

    Raises:
        MeshError: operands on different meshes.
        DtypeError: operands of different dtypes.
    """
    recorded = torch.is_grad_enabled()
    parts: list[Any] = [name, key, None if asked is NOTHING else asked]  # which has no hash at hand
    for t in tensors:
        parts.append(t._spec)
        if recorded:
            parts.append((t.requires_grad, is_leaf(t)))
    full_key = tuple(parts)
    choices = current().choices
    found: Product | None = choices.get(full_key)
    if found is None:
        common_mesh(cls, name, list(tensors))
        specs = [t._spec for t in tensors]
        needs, leaf = [recorded and t.requires_grad for t in tensors[:2]], [is_leaf(t) for t in tensors[:2]]
        found = choices.add(full_key, _decide(name, rule, infer, specs, asked, needs, leaf))
    else:
        choices.hits += 1
    return found


def is_leaf(x: Any) -> bool:
    """Whether `x` is a leaf of autograd; where it is traced, whether what it stands for is."""
    found: bool | None = x._leaf
    return x.is_leaf if found is None else found


def _decide(
    name: str,
    rule: Callable[[], Rule],
    infer: Infer,
    specs: Sequence[Spec],
    asked: Asked,
    needs: Sequence[bool],
    leaf: Sequence[bool],
) -> Product:
    mesh = specs[0].layout.mesh
    same_dtype(name, [spec.dtype for spec in specs])
    with torch.no_grad():
        out = infer(*(spec.meta() for spec in specs))
    operands = [Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs[:2]]
    shape, topology = tuple(out.shape), current().topology_of(mesh)

    def chosen(rule: Rule, operands: Sequence[Operand]) -> tuple[Strategy, Wanted]:
        wanted = asked.wanted(rule, mesh, needs, leaf)
        return choose(rule, operands, [(shape, out.itemsize)], topology, wanted), wanted

    found, pair = rule(), (specs[0], specs[1])
    strategy, wanted = chosen(found, operands)
    cut = cut_contraction(found, operands)
    if cut is not None:
        by_blocks, wanted_so = chosen(cut.rule, cut.operands)
        if by_blocks.seconds < strategy.seconds:
            found, strategy, wanted = cut.rule, by_blocks, wanted_so
            pair = _cut_spec(specs[0], cut.operands[0]), _cut_spec(specs[1], cut.operands[1])
        else:
            cut = None
    asked_where = wanted.result is not None or wanted.reduced is not None
    layout = strategy.ends[0] if asked_where else strategy.outputs[0]
    out_spec = spec_of(layout, shape, contiguous_stride(shape), out.dtype, specs[0].device)
    bias = specs[2] if len(specs) > 2 else None
    return Product(name, found, pair, bias, out_spec, strategy, wanted, cut, asked.streamed())


def _cut_spec(spec: Spec, operand: Operand) -> Spec:
    return spec_of(operand.layout, operand.shape, contiguous_stride(operand.shape), spec.dtype, spec.device)


def wrapped(cls: Any, name: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """The operands, all distributed: those that autograd made plain, of zeros, are whole on every rank.

    Raises:
        MeshError: operands on different meshes.
        MixedError: a plain tensor among them.
    """
    mesh = common_mesh(cls, name, list(tensors))
    return [distributed(cls, t, replicated(mesh)) for t in tensors]
