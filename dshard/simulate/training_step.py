"""Simulate a training step: blocks, pipeline, gradient sums of the replicas, optimiser; seconds and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dshard.cost import collective_seconds, work_seconds
from dshard.errors import ShapeError, StrategyError
from dshard.explain import parse_dtype
from dshard.layout import Layout, Shape
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.simulate.block import BlockCosts, BlockMatmul, block_events, matmuls, worked_layouts
from dshard.simulate.memory import Memory, memory_of
from dshard.simulate.setup import STAGES, Setup
from dshard.simulate.transformer import Linear, Model
from dshard.step_timeline import Event, Phase, PlacedEvent, makespan, place_events
from dshard.topology import Topology
from dshard.topology.network import check_topology
from dshard.validate import as_int, check_type

# -- vectors of a block, biases and the parameters of norms: their layouts follow from the matmuls and the residual
# stream: a bias is added where its matmul leaves the result, and a norm works in the layout of the stream; the gradient
# of either is partial where tokens are sharded


@dataclass(frozen=True, slots=True)
class Vector:
    """A parameter vector of each stage: its layouts when stored and used, and the layout in which its gradient arises.

    `again` says that the backward pass uses it, too.
    """

    name: str
    shape: Shape
    stored: Layout
    used: Layout
    gradient: Layout
    again: bool

    def gathered(self, costs: BlockCosts, phase: Phase) -> list[Event]:
        """The redistribution of a vector to the layout in which a pass uses it."""
        if phase == "backward" and not self.again:
            return []
        return costs.moved(self.name, phase, self.stored, self.used, self.shape, waits=not costs.prefetches)

    def summed(self, costs: BlockCosts) -> list[Event]:
        """The redistribution of the gradient to the layout in which the vector is stored, once a step."""
        return costs.moved(f"{self.name} sum", "step", self.gradient, self.stored.cotangent(), self.shape, waits=False)


def vectors(costs: BlockCosts) -> tuple[Vector, ...]:
    """The vectors of one block, in the order of the forward pass."""
    model, setup, form = costs.model, costs.setup, costs.setup.form
    stream, kinds = setup.activation(form.residual), ("weight", "bias") if model.biased else ("weight",)
    with_weights = setup.sharded == "all" or any(form.gathered)  # what is gathered with a weight is so twice, as it is
    block_vectors: list[Vector] = []
    for matmul, norm, features in zip(
        matmuls(model, setup, model.sequence),
        ("norm1", None, "norm2", None),
        (form.inner, form.residual, form.inner, form.residual),
        strict=True,
    ):
        if norm is not None:
            shape, stored = (setup.stages, model.hidden), setup.vector(form.residual)
            block_vectors += [Vector(f"{norm} {kind}", shape, stored, *_along(stream), True) for kind in kinds]
        if model.biased:
            output = worked_layouts(matmul.x.mesh, matmul.loops)[2]
            shape, name = (setup.stages, matmul.linear.features_out), f"{matmul.linear.name} bias"
            block_vectors.append(Vector(name, shape, setup.vector(features), *_along(output), with_weights))
    return tuple(block_vectors)


def _along(tokens: Layout) -> tuple[Layout, Layout]:
    """The layouts of a vector in use and of its gradient, beside `[stage, tokens, features]` in layout `tokens`."""
    used: dict[Placement, Placement] = {Shard(0): Shard(0), Shard(2): Shard(1)}
    gradient = used | {Shard(1): Partial()}
    first, second = (
        Layout(tokens.mesh, tuple(dims.get(p, Replicate()) for p in tokens.placements)) for dims in (used, gradient)
    )
    return first, second


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of one rank in a step: seconds on each queue, operations, bytes received, collectives."""

    compute: float
    network: float
    flops: float
    nbytes: int
    collectives: int


@dataclass(frozen=True, slots=True)
class Step:
    """A simulated training step of a rank of the first stage."""

    setup: Setup
    batch: int
    seconds: float
    memory: Memory
    totals: Totals
    bubble: float

    @property
    def sequences_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The events of a step: one microbatch through one block, forward and backward, and the end of the step."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    ends: tuple[Event, ...]
    sums: tuple[Event, ...]
    update: Event
    hop: float


def simulate_step(
    model: Model,
    setup: Setup,
    topology: Topology,
    batch: int,
    *,
    dtype: str = "bfloat16",
    itemsize: int = 2,
    overlap: bool = True,
    exact: bool = True,
) -> Step:
    """Simulate a step on `batch` sequences: the closed form for standard blocks, all of it from layouts and plans.

    Plans are the cheapest, or with `exact=False` those found without a search.

    Microbatches run one after the other through the stages (1F1B: `microbatches + stages - 1` slots); the gradients of
    the replicas are summed once, behind the last backward pass where `overlap`.

    Raises:
        StrategyError: the form's sizes do not fit it.
        ShapeError: batch, layers or heads that do not divide.
        TopologyError: the topology has fewer ranks.
    """
    costs = _costs(model, setup, topology, batch, dtype, itemsize, exact)
    sequences = batch // setup.microbatches
    parts = parts_of(costs, sequences)
    blocks, slots = model.layers // setup.stages, setup.microbatches + setup.stages - 1
    each = makespan(place_events(_microbatch(parts, blocks, setup), overlap=overlap))
    last = makespan(
        place_events([*_microbatch(parts, blocks, setup, parts.sums), _BARRIER, parts.update], overlap=overlap)
    )
    seconds = (slots - 1) * each + last + slots * 2 * parts.hop
    return Step(
        setup,
        batch,
        seconds,
        memory_of(costs, sequences),
        _totals(parts, blocks, setup),
        1 - setup.microbatches / slots,
    )


def timeline(
    model: Model,
    setup: Setup,
    topology: Topology,
    batch: int,
    *,
    dtype: str = "bfloat16",
    itemsize: int = 2,
    overlap: bool = True,
) -> tuple[PlacedEvent, ...]:
    """One microbatch of a stage, block by block, and the end of the step, each event with its begin.

    Raises:
        StrategyError, ShapeError, TopologyError: as `simulate_step`.
    """
    parts = parts_of(_costs(model, setup, topology, batch, dtype, itemsize), batch // setup.microbatches)
    events = _microbatch(parts, model.layers // setup.stages, setup, parts.sums)
    return place_events([*events, _BARRIER, parts.update], overlap=overlap)


def _costs(
    model: Model, setup: Setup, topology: Topology, batch: int, dtype: str, itemsize: int, exact: bool = True
) -> BlockCosts:
    """The inputs of a block's price, checked."""
    way_out = "give a dshard.simulate.Setup, as in Setup(form_of('megatron'), (2,))"
    check_type(setup, Setup, "setup", way_out, StrategyError)
    check_topology(topology)
    dtype, itemsize = dtype_name(dtype, topology), as_int(itemsize, "itemsize", ShapeError, least=1)
    setup.check(model, batch)
    return BlockCosts(model, setup, topology, dtype, itemsize, exact)


def dtype_name(dtype: object, topology: Topology) -> str:
    """The name of a dtype, of torch's or of those that the topology has a rate of."""
    name = str(dtype).removeprefix("torch.")
    return name if name in dict(topology.device.flops) else str(parse_dtype(name)).removeprefix("torch.")


def parts_of(costs: BlockCosts, sequences: int) -> StepEvents:
    """The events of a step on microbatches of `sequences` sequences, on all replicas together."""
    setup, model = costs.setup, costs.model
    own = vectors(costs)
    forward, backward = (
        (*(event for vector in own for event in vector.gathered(costs, phase)), *events)
        for phase, events in zip(_PASSES, block_events(costs, sequences), strict=True)
    )
    linears = matmuls(model, setup, sequences * model.sequence)
    numel = sum(p.state.local_numel(p.shapes[1]) for p in linears) * model.layers // setup.stages
    host = sum(event.seconds for event in costs.hosted("step")) * (model.layers // setup.stages)
    update = Event("optimizer", "step", "compute", host + work_seconds(0.0, 16.0 * numel, costs.topology))
    residual = setup.activation(setup.form.residual)
    nbytes = residual.local_numel(setup.shape(sequences * model.sequence, model.hidden)) * costs.itemsize
    hop = collective_seconds("permute", nbytes, setup.mesh, [STAGES], costs.topology) if setup.stages > 1 else 0.0
    sums = (*_sums(costs, linears), *(event for vector in own for event in vector.summed(costs)))
    return StepEvents(forward, backward, _ends(costs, sequences), sums, update, hop)


_PASSES: tuple[Phase, Phase] = ("forward", "backward")


def _sums(costs: BlockCosts, linears: Sequence[BlockMatmul]) -> list[Event]:
    """The events that sum the gradients of a block's weights over the replicas, once a step."""
    events = []
    for matmul in linears:
        shape, target = matmul.shapes[1], matmul.state.cotangent()
        name = matmul.linear.name
        events += costs.moved(f"{name} sum", "step", matmul.sums, target, shape, waits=False)
        if costs.setup.sharded == "optimizer":  # the new weights go back to all replicas
            events += costs.moved(f"{name} weight", "step", target, matmul.w, shape, waits=False)
    return events


def _ends(costs: BlockCosts, sequences: int) -> tuple[Event, ...]:
    """The head, a matmul with the vocabulary, forward and backward; the embedding reads rows and is not counted."""
    model, setup = costs.model, costs.setup
    if not model.vocabulary:
        return ()
    form, tokens = setup.form, sequences * model.sequence
    stored = setup.stored(form.first)
    sums = stored.cotangent() if setup.sharded == "all" else stored
    linear = Linear("head", model.hidden, model.vocabulary)
    x, y = setup.activation(form.residual), setup.activation(form.inner)
    head = BlockMatmul(linear, tokens, x, stored, y, sums, setup.shared(form.first), f"sm{form.first_loops}")
    return (*head.forward(costs), *head.backward(costs))


_BARRIER = Event("gradients", "step", "network", 0.0)
"""The optimiser waits for the last of them."""


def _microbatch(parts: StepEvents, blocks: int, setup: Setup, sums: Sequence[Event] = ()) -> list[Event]:
    """One microbatch through one stage, forward and backward; `sums` follow the backward pass of each block."""
    again = parts.forward if setup.recompute else ()
    return [*parts.forward * blocks, *parts.ends, *[*again, *parts.backward, *sums] * blocks]


def _totals(parts: StepEvents, blocks: int, setup: Setup) -> Totals:
    again = parts.forward if setup.recompute else ()
    each = [*parts.forward, *again, *parts.backward]
    compute = network = flops = 0.0
    nbytes = collectives = 0
    for events, times in ((each, blocks * setup.microbatches), (parts.ends, setup.microbatches), (parts.sums, blocks)):
        for event in events:
            compute += times * event.seconds * (event.queue == "compute")
            network += times * event.seconds * (event.queue == "network")
            flops += times * event.flops
            nbytes += times * event.nbytes
            collectives += times * event.collectives
    return Totals(compute + parts.update.seconds, network, flops, nbytes, collectives)
