"""The vectors of a block, biases and the parameters of norms: their layouts, and the collectives for them.

They follow from the matmuls and from the residual stream: a bias is added where its matmul leaves the result, and a
norm works in the layout of the stream. The gradient of either is partial where tokens are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

from dshard.layout import Layout, Shape
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.simulate.block import BlockCosts, matmuls, worked_layouts
from dshard.simulate.queues import Event, Phase


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
