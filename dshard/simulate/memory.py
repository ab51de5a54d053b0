"""Bytes that a rank of the first stage holds: weights, gradients, optimiser, activations kept for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from dshard.simulate.block import BlockCosts, BlockMatmul, attention_moves, matmuls, worked_layouts


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the peak of a step, by use."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    transient: int

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


def memory_of(costs: BlockCosts, sequences: int) -> Memory:
    """The memory of the busiest rank, which is in the first stage, with the most microbatches in flight.

    `sequences` are those of one microbatch on all replicas together. The optimiser is Adam: two fp32 moments for each
    element of a weight, and an fp32 copy of weights that have fewer bytes.
    """
    model, setup = costs.model, costs.setup
    linears = matmuls(model, setup, sequences * model.sequence)
    blocks = model.layers // setup.stages
    stored = sum(p.w.local_numel(p.shapes[1]) for p in linears) * blocks
    shared = sum(p.state.local_numel(p.shapes[1]) for p in linears) * blocks
    ends = (setup.form.first, setup.shape(model.hidden, model.vocabulary))
    tables = 1 if model.tied and setup.stages == 1 else 1 + (setup.stages == 1)
    if model.vocabulary:
        stored += tables * setup.stored(ends[0]).local_numel(ends[1])
        shared += tables * setup.shared(ends[0]).local_numel(ends[1])
    extra = 8 + (4 if costs.itemsize < 4 else 0)
    in_flight = min(setup.microbatches, setup.stages)
    kept = _residual(costs, sequences) if setup.recompute else kept_by_block(costs, linears, sequences)
    activations = kept * blocks * in_flight + (kept_by_block(costs, linears, sequences) if setup.recompute else 0)
    return Memory(
        stored * costs.itemsize,
        stored * costs.itemsize,
        shared * extra,
        activations,
        max(_transient(costs, p) for p in linears),
    )


def kept_by_block(costs: BlockCosts, linears: tuple[BlockMatmul, ...], sequences: int) -> int:
    """Bytes that one block keeps for its backward pass.

    These are the inputs of both norms, of the four linear layers and of the activation function; queries, keys and
    values in attention's layout; and the scores if attention is not fused. Inputs of matmuls are kept gathered, unless
    they are gathered again; weights as stored.
    """
    model, setup = costs.model, costs.setup
    qkv, up = linears[0], linears[2]
    inputs = (p.x if costs.regather else worked_layouts(p.x.mesh, p.loops)[0] for p in linears)
    numel = sum(x.local_numel(p.shapes[0]) for x, p in zip(inputs, linears, strict=True))
    numel += qkv.y.local_numel(qkv.shapes[2]) + up.y.local_numel(up.shapes[2])
    nbytes = numel * costs.itemsize + 2 * _residual(costs, sequences)
    if not model.fused:
        scores = setup.scores(model, sequences) * sequences * model.heads * model.sequence**2
        nbytes += int(2 * scores * costs.itemsize)
    for src, dst, shape in attention_moves(costs, sequences * model.sequence)[0]:
        nbytes += (dst.local_numel(shape) - src.local_numel(shape)) * costs.itemsize
    return nbytes


def _residual(costs: BlockCosts, sequences: int) -> int:
    model, setup = costs.model, costs.setup
    layout = setup.activation(setup.form.residual)
    return layout.local_numel(setup.shape(sequences * model.sequence, model.hidden)) * costs.itemsize


def _transient(costs: BlockCosts, matmul: BlockMatmul) -> int:
    """Bytes of operands gathered for one matmul, and of its result before it is redistributed.

    A kept gathered input counts in `kept_by_block`.
    """
    worked = worked_layouts(matmul.x.mesh, matmul.loops)
    stored = matmul.x if costs.regather else worked[0], matmul.w, matmul.y
    moves = zip(stored, worked, matmul.shapes, strict=True)
    return sum(at.local_numel(shape) for own, at, shape in moves if own != at) * costs.itemsize
