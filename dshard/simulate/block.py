"""The work and communication of one block of a transformer under a setup, forward and backward.

Each linear layer is a matmul with a loop for each mesh axis. Its operands are redistributed to the layouts that the
loops need, multiplied, and the result is redistributed for the next layer; the two matmuls of the backward pass
are the same with the roles of the tensors exchanged (Optimus equations 1-3). All of it is planned and priced by
`dshard.redistribute`, so a form is nothing but its layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dshard.caches import cached
from dshard.cost import work_seconds
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.redistribute import Plan, plan
from dshard.simulate.block_program import operators_of_phases
from dshard.simulate.setup import Setup
from dshard.simulate.tensor_forms import Placements
from dshard.simulate.transformer import Linear, Model
from dshard.step_timeline import PHASES, Event, Phase
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """The inputs of a block's price: the model, its setup, the topology, and the dtype of activations and weights.

    `regather`: whether the inputs of matmuls are gathered again for the gradients of their weights, as in the papers;
    models of `parallelize` keep them gathered.
    """

    model: Model
    setup: Setup
    topology: Topology
    dtype: str = "bfloat16"
    itemsize: int = 2
    exact: bool = True
    regather: bool = False

    def plan(self, src: Layout, dst: Layout, shape: Shape, itemsize: int | None = None) -> Plan:
        """The cheapest plan of a redistribution; where thousands of setups are compared, one made without a search."""
        itemsize = self.itemsize if itemsize is None else itemsize
        return plan(src, dst, shape, itemsize, self.topology, search="lean" if self.exact else "greedy")

    def moved(
        self, name: str, phase: Phase, src: Layout, dst: Layout, shape: Shape, *, waits: bool = True
    ) -> list[Event]:
        """The event of a redistribution from `src` to `dst`, if it has any step."""
        move = self.plan(src, dst, shape)
        return [move_event(name, phase, move, self.itemsize, waits=waits)] if move.steps else []

    @property
    def prefetches(self) -> bool:
        """Whether weights are gathered from the replicas, which may overlap the matmul before."""
        return self.setup.sharded == "all"

    def hosted(self, phase: Phase) -> list[Event]:
        """The event of the host's time for the operators of a block, if the topology has that of one operator."""
        if not (self.topology.dispatch or self.topology.in_place):
            return []
        operators = dict(zip(PHASES, operators_of_phases(), strict=True))[phase]
        return [Event("host", phase, "compute", operators.seconds(self.topology))]

    def worked(self, name: str, phase: Phase, flops: float, nbytes: float) -> Event:
        """The event of local work of `flops` operations on `nbytes` bytes."""
        seconds = work_seconds(flops, nbytes, self.topology, self.dtype)
        return Event(name, phase, "compute", seconds, flops=flops, nbytes=0)


def move_event(name: str, phase: Phase, plan: Plan, itemsize: int, *, waits: bool = True) -> Event:
    """The event of a redistribution's plan."""
    axes = tuple(dict.fromkeys(axis for step in plan.steps for axis in step.axes))
    nbytes = plan.busiest() * itemsize
    return Event(name, phase, "network", plan.seconds, 0.0, nbytes, len(plan.steps), axes, waits)


@dataclass(frozen=True, slots=True)
class BlockMatmul:
    """`y = x w` on a mesh: where the three are stored, and the loop of each mesh axis.

    Loop s is that of stages, which have matmuls of their own. `sums` is the layout of the weight's gradient after
    backward; sums over the replicas are reduced once a step, to `state`, the layout of the optimizer's state.
    """

    linear: Linear
    tokens: int
    x: Layout
    w: Layout
    y: Layout
    sums: Layout
    state: Layout
    loops: str

    @property
    def flops(self) -> float:
        """Operations of each rank in the forward pass."""
        ranks = 1
        for size, loop in zip(self.x.mesh.shape, self.loops, strict=True):
            ranks *= size if loop != "s" else 1
        return 2.0 * self.tokens * self.linear.parameters / ranks

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """The global shapes of x, w and y."""
        linear, stages = self.linear, self.x.mesh.shape[0]
        return (
            (stages, self.tokens, linear.features_in),
            (stages, linear.features_in, linear.features_out),
            (stages, self.tokens, linear.features_out),
        )

    def forward(self, costs: BlockCosts) -> list[Event]:
        """Redistribute the operands, multiply, redistribute the result for its reader."""
        name = self.linear.name
        (at_x, at_w, at_y), (shape_x, shape_w, shape_y) = worked_layouts(self.x.mesh, self.loops), self.shapes
        return [
            *costs.moved(f"{name} x", "forward", self.x, at_x, shape_x),
            *costs.moved(f"{name} w", "forward", self.w, at_w, shape_w, waits=not costs.prefetches),
            costs.worked(name, "forward", self.flops, self._touched(costs)),
            *costs.moved(f"{name} y", "forward", at_y, self.y, shape_y),
        ]

    def backward(self, costs: BlockCosts) -> list[Event]:
        """Redistribute the gradient of y and both operands, multiply twice, redistribute to the operands' layouts."""
        name = self.linear.name
        (at_x, at_w, at_y), (shape_x, shape_w, shape_y) = worked_layouts(self.x.mesh, self.loops), self.shapes
        grad_x, grad_w = gradient_layouts(self.x.mesh, self.loops)
        return [
            *costs.moved(f"{name} dy", "backward", self.y.cotangent(), at_y.cotangent(), shape_y),
            *costs.moved(f"{name} w", "backward", self.w, at_w, shape_w, waits=not costs.prefetches),
            costs.worked(f"{name} dx", "backward", self.flops, self._touched(costs)),
            *costs.moved(f"{name} dx", "backward", grad_x, self.x.cotangent(), shape_x),
            *(costs.moved(f"{name} x", "backward", self.x, at_x, shape_x) if costs.regather else ()),
            costs.worked(f"{name} dw", "backward", self.flops, self._touched(costs)),
            *costs.moved(f"{name} dw", "backward", grad_w, self.sums, shape_w, waits=False),
        ]

    def _touched(self, costs: BlockCosts) -> float:
        layouts = worked_layouts(self.x.mesh, self.loops)
        parts = (layout.local_numel(shape) for layout, shape in zip(layouts, self.shapes, strict=True))
        return float(sum(parts) * costs.itemsize)


@cached("simulated setups", 4096)
def worked_layouts(mesh: Mesh, loops: str) -> tuple[Layout, Layout, Layout]:
    """The layouts of x, w and y in which local matmuls make the local tensors of the result.

    >>> [str(layout) for layout in worked_layouts(Mesh((2, 2), ("r", "c")), "mn")]
    ['r:S(1) c:R', 'r:R c:S(2)', 'r:S(1) c:S(2)']
    """
    x = {"s": Shard(0), "m": Shard(1), "k": Shard(2)}
    w = {"s": Shard(0), "k": Shard(1), "n": Shard(2)}
    y: dict[str, Placement] = {"s": Shard(0), "m": Shard(1), "n": Shard(2), "k": Partial()}
    return tuple(Layout(mesh, tuple(dims.get(loop, Replicate()) for loop in loops)) for dims in (x, w, y))  # type: ignore[return-value]


@cached("simulated setups", 4096)
def gradient_layouts(mesh: Mesh, loops: str) -> tuple[Layout, Layout]:
    """The layouts in which the gradients of x and w arise: partial on the axes that shard the other operand alone."""
    x: dict[str, Placement] = {"s": Shard(0), "m": Shard(1), "k": Shard(2), "n": Partial()}
    w: dict[str, Placement] = {"s": Shard(0), "k": Shard(1), "n": Shard(2), "m": Partial()}
    first, second = (Layout(mesh, tuple(dims.get(loop, Replicate()) for loop in loops)) for dims in (x, w))
    return first, second


def matmuls(model: Model, setup: Setup, tokens: int) -> tuple[BlockMatmul, ...]:
    """The four linear layers of a block, for `tokens` tokens on all replicas together."""
    form = setup.form
    qkv, out, up, down = model.linears

    def matmul(linear: Linear, x: Placements, w: Placements, y: Placements, loops: str) -> BlockMatmul:
        stored = setup.stored(w)
        sums = stored.cotangent() if setup.sharded == "all" else setup.weight(w).replace(1, Partial())
        places = setup.activation(x), stored, setup.activation(y), sums, setup.shared(w)
        return BlockMatmul(linear, tokens, *places, f"sm{loops}")

    return (
        matmul(qkv, form.residual, form.first, form.inner, form.first_loops),
        matmul(out, form.inner, form.second, form.residual, form.second_loops),
        matmul(up, form.residual, form.first, form.inner, form.first_loops),
        matmul(down, form.inner, form.second, form.residual, form.second_loops),
    )


def block_events(costs: BlockCosts, sequences: int) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """The events of one block, forward and backward, for `sequences` sequences on all replicas together."""
    model, setup = costs.model, costs.setup
    rest = _Rest(costs, sequences)
    qkv, out, up, down = matmuls(model, setup, sequences * model.sequence)
    forward = [
        *costs.hosted("forward"),
        *rest.norm("forward"),
        *qkv.forward(costs),
        *rest.attention("forward"),
        *out.forward(costs),
        *rest.norm("forward"),
        *up.forward(costs),
        rest.activation("forward"),
        *down.forward(costs),
    ]
    backward = [
        *costs.hosted("backward"),
        *down.backward(costs),
        rest.activation("backward"),
        *up.backward(costs),
        *rest.norm("backward"),
        *out.backward(costs),
        *rest.attention("backward"),
        *qkv.backward(costs),
        *rest.norm("backward"),
    ]
    return tuple(forward), tuple(backward)


Move: TypeAlias = tuple[Layout, Layout, Shape]
"""A tensor of this shape that is redistributed from one layout to another."""


def attention_moves(costs: BlockCosts, tokens: int) -> tuple[list[Move], list[Move]]:
    """The moves before and after attention where ranks share sequences: of queries, keys and values, and of the result.

    With loop h all are moved to the heads, and the result back; with loop q keys and values are gathered. Unless the
    form has loop h, the cheaper of both, forward and backward.
    """
    setup, model = costs.setup, costs.model
    if setup.chunks_of_sequence == 1:
        return [], []
    here, keys = setup.activation(setup.form.inner), model.qkv - model.query
    heads, gathered = setup.attention(Shard(2)), setup.attention(Replicate())
    by_heads = [(here, heads, setup.shape(tokens, model.qkv))], [(heads, here, setup.shape(tokens, model.query))]
    by_queries: tuple[list[Move], list[Move]] = [(here, gathered, setup.shape(tokens, keys))], []
    ranks = setup.chunks_of_sequence * setup.chunks_of_heads
    if setup.form.by_heads:
        return by_heads
    divide = not (model.heads % ranks or (model.kv_heads or model.heads) % ranks)
    return min([by_queries, by_heads] if divide else [by_queries], key=lambda moves: _seconds(costs, moves))


def _seconds(costs: BlockCosts, moves: tuple[list[Move], list[Move]]) -> float:
    there = [*moves[0], *moves[1]]
    return sum(costs.plan(*move).seconds for move in (*there, *_back(there)))


def _back(moves: Sequence[Move]) -> list[Move]:
    """The moves of the gradients: a gathered tensor's gradient is reduced."""
    return [(_summed(src, dst), src, shape) for src, dst, shape in reversed(moves)]


def _summed(src: Layout, dst: Layout) -> Layout:
    """The initial layout of the gradient of a tensor that was redistributed from `src` to `dst`."""
    for axis, (before, after) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if isinstance(before, Shard) and after == Replicate():
            dst = dst.replace(axis, Partial())
    return dst


@dataclass(frozen=True, slots=True)
class _Rest:
    """The work between the matmuls of linear layers: norms with the residual sum, activation function, attention."""

    costs: BlockCosts
    sequences: int

    def norm(self, phase: Phase) -> list[Event]:
        """A norm and a residual sum; where features are sharded, two sums a token complete the statistics."""
        costs, setup = self.costs, self.costs.setup
        tokens = self.sequences * costs.model.sequence
        layout = setup.activation(setup.form.residual)
        nbytes = layout.local_numel(setup.shape(tokens, costs.model.hidden)) * costs.itemsize
        partial = tuple(Partial() if p == Shard(2) else p for p in layout.placements)
        replicated = tuple(Replicate() if p == Shard(2) else p for p in layout.placements)
        src, dst = Layout(layout.mesh, partial), Layout(layout.mesh, replicated)
        reduction = costs.plan(src, dst, setup.shape(tokens, 2), 4)
        sums = [move_event("norm", phase, reduction, 4)] if reduction.steps else []
        return [*sums, costs.worked("norm", phase, 0.0, nbytes * (5 if phase == "forward" else 7))]

    def activation(self, phase: Phase) -> Event:
        """The activation function between the layers of a pair: reads its input, or input and gradient; writes one."""
        costs, setup = self.costs, self.costs.setup
        tokens, features = self.sequences * costs.model.sequence, costs.model.linears[2].features_out
        nbytes = setup.activation(setup.form.inner).local_numel(setup.shape(tokens, features)) * costs.itemsize
        return costs.worked("activation", phase, 0.0, nbytes * (2 if phase == "forward" else 3))

    def attention(self, phase: Phase) -> list[Event]:
        """Scores, softmax and values; a fused backward pass computes the scores once more (2.5 times the forward)."""
        costs, setup, model = self.costs, self.costs.setup, self.costs.model
        share = setup.scores(model, self.sequences)
        tokens = self.sequences * model.sequence
        nbytes = 2.0 * tokens * model.qkv * costs.itemsize
        if not model.fused:
            nbytes += 4.0 * self.sequences * model.heads * model.sequence**2 * costs.itemsize
        share *= 1.0 if phase == "forward" else 2.5 if model.fused else 2.0
        work = costs.worked("attention", phase, share * model.core_flops(self.sequences), share * nbytes)
        before, after = attention_moves(costs, self.sequences * model.sequence)
        pair = (before, after) if phase == "forward" else (_back(after), _back(before))
        return [*self._sent("attention", phase, pair[0]), work, *self._sent("attention", phase, pair[1])]

    def _sent(self, name: str, phase: Phase, moves: Sequence[Move]) -> list[Event]:
        return [event for move in moves for event in self.costs.moved(name, phase, *move)]
