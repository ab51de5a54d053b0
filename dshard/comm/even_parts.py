"""Shapes that a rank assumes all ranks to give, compared through the store before the next collective.

Without `shape` nothing is sent by `from_local`, so each rank assumes that the local shapes of all ranks equal its own;
what `distribute_tensor` sends has the sizes of the global tensor, which all ranks give. If they differ, the ranks would
begin collectives of different sizes, which ends the process on gloo and writes garbage on NCCL. So a rank publishes
each assumed shape and dtype, once, in the store of the process group. Just before its next
collective it reads whether the others have assumed the same. They are about to meet there anyway, so no rank waits
longer than in the collective. A shape that was assumed before costs nothing more.

A rank assumes a former shape again without publishing it. A peer with a different shape then sees that this rank waits
in a collective after its `from_local`, without having published the peer's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep

import torch

from dshard.comm import store_messages
from dshard.comm.events import before_next_collective
from dshard.comm.peer_failure import leave_word, waits_ahead
from dshard.comm.process_groups import LocalShape, this_world
from dshard.comm.runtime import runtime_of
from dshard.comm.user_code import user_line
from dshard.errors import DtypeError, ShapeError
from dshard.layout import Layout, Shape

FROM_LOCAL = "from_local"
SECONDS = 10.0
"""The time for which a rank waits for a peer that has neither published a shape nor waits in a collective."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """The `number`th shape and dtype that this rank assumes `call` to be given on all ranks, and its line."""

    call: str
    layout: Layout
    part: LocalShape
    number: int
    rank: int
    line: str
    world: int

    @property
    def key(self) -> str:
        """The key of the assumed shapes in the store."""
        mesh = self.layout.mesh
        return f"dshard/even parts/{self.world}/{self.call}/{mesh.ranks}/{mesh.shape}/{self.layout}/{self.number}"


def take_as_even(shape: Shape, dtype: torch.dtype, layout: Layout, call: str = FROM_LOCAL) -> None:
    """Assume the shape and dtype of the tensor that this rank gives `call` on all ranks of the mesh.

    The next collective of this rank begins once the others have assumed the same.
    """
    world = this_world()
    taken = world.even_parts.get((call, layout))
    if taken is None:
        taken = world.even_parts[call, layout] = {}
    elif (shape, dtype) in taken:
        return
    part = LocalShape(shape, dtype)
    taken[part] = len(taken)
    runtime = runtime_of(layout.mesh)
    if runtime is None or runtime.coordinate is None or not runtime.group(layout.mesh.names).backend.carries_data:
        return
    own = _Taken(call, layout, part, taken[part], layout.mesh.rank(runtime.coordinate), user_line(), world.count)
    store_messages.append(own.key, f"{own.rank}:{part};")
    before_next_collective(partial(_compare, own))


def _compare(own: _Taken) -> None:
    """Wait until all ranks of the mesh have assumed the same shape and dtype."""
    if own.world != this_world().count:
        return
    end, pause = monotonic() + SECONDS, 0.001
    while monotonic() < end:
        entries = store_messages.appended(own.key).split(";")[:-1]
        parts = {int(rank): part for rank, _, part in (entry.partition(":") for entry in entries)}
        missing = [rank for rank in own.layout.mesh.ranks if rank not in parts]
        differing = {rank: part for rank, part in parts.items() if part != str(own.part)}
        ahead = [] if differing else [rank for rank in missing if waits_ahead(rank)]
        if differing or ahead:
            error = _refused(own, differing, ahead)
            leave_word(error)
            raise error
        if not missing:
            return
        sleep(pause)
        pause = min(2 * pause, 0.05)


def _refused(own: _Taken, differing: dict[int, str], ahead: list[int]) -> ShapeError | DtypeError:
    listed = [f"{part} on rank {rank}" for rank, part in sorted(differing.items())[:4]]
    listed += [f"another on rank {rank}, which has gone on" for rank in sorted(ahead)[:4]]
    what = f"{own.part} on rank {own.rank} and {', '.join(listed)} ({own.line})"
    if differing and all(part.startswith(f"{own.part.shape} ") for part in differing.values()):
        return DtypeError(f"{own.call}: the ranks give tensors of {what}: convert them to one, with .to(dtype)")
    if own.call != FROM_LOCAL:
        return ShapeError(
            f"{own.call} of another tensor on each rank, {what}: every rank gives the whole tensor; where each has a "
            "part, use DTensor.from_local, which takes uneven ones with shape= or run_check=True"
        )
    return ShapeError(
        f"from_local of uneven local tensors, {what}: without shape= they count as even parts of one tensor, and "
        "nothing is sent; give the global shape, shape=..., or let the ranks tell each other, run_check=True"
    )
