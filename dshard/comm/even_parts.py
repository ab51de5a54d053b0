"""Local shapes that `from_local` counts as those of all ranks, compared in the store before the next collective.

Without `shape` nothing is sent, so each rank alone takes its local tensor for one of several even parts. Where that is
wrong the ranks would begin collectives of different sizes, which ends the process on gloo and writes garbage on NCCL.
So a rank tells each local shape and dtype that it takes, once, in the store at which the ranks met. Just before its
next collective it looks up whether the others have taken the same. They are about to meet there anyway, so
nobody waits longer than in the collective. Shapes that were taken before cost nothing more.

A rank that took a shape some time ago takes it again without a word. A rank for which that is the wrong one sees that
this peer waits in a collective after its `from_local`, and has not taken the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep

import torch

from dshard.comm import store_messages
from dshard.comm.events import before_next_collective
from dshard.comm.peer_failure import leave_word, waits_ahead
from dshard.comm.process_groups import Part, this_world
from dshard.comm.runtime import runtime_of
from dshard.comm.user_code import user_line
from dshard.errors import DtypeError, ShapeError
from dshard.layout import Layout, Shape

SECONDS = 10.0
"""How long a rank waits for a peer that has neither taken a shape nor waits in a collective; then it goes on."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """The `number`th local part that this rank takes for one of even parts under a layout, at a line of the program."""

    layout: Layout
    part: Part
    number: int
    rank: int
    line: str
    world: int

    @property
    def key(self) -> str:
        """The key of what the ranks take in the store."""
        mesh = self.layout.mesh
        return f"dshard/even parts/{self.world}/{mesh.ranks}/{mesh.shape}/{self.layout}/{self.number}"


def take_as_even(shape: Shape, dtype: torch.dtype, layout: Layout) -> None:
    """Let the shape and dtype of this rank's local tensor count as those of all ranks of the mesh.

    The next collective of this rank begins once the others have taken the same.
    """
    world = this_world()
    part = Part(shape, str(dtype))
    taken = world.even_parts.setdefault(layout, {})
    if part in taken:
        return
    taken[part] = len(taken)
    runtime = runtime_of(layout.mesh)
    if runtime is None or runtime.coordinate is None or not runtime.group(layout.mesh.names).backend.carries_data:
        return
    own = _Taken(layout, part, taken[part], layout.mesh.rank(runtime.coordinate), user_line(), world.count)
    store_messages.append(own.key, f"{own.rank}:{part};")
    before_next_collective(partial(_compare, own))


def _compare(own: _Taken) -> None:
    """Go on once all ranks of the mesh have taken the part.

    Raises:
        ShapeError: a rank has taken a part of another shape.
        DtypeError: a rank has taken a part of another dtype.
    """
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
        return DtypeError(f"from_local: the ranks give local tensors of {what}: convert them to one, with .to(dtype)")
    return ShapeError(
        f"from_local of uneven local tensors, {what}: without shape= they count as even parts of one tensor, and "
        "nothing is sent; give the global shape, shape=..., or let the ranks tell each other, run_check=True"
    )
