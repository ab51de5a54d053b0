"""Debug mode: with DSHARD_DEBUG=1 the ranks compare their next steps, so that divergence raises instead of hanging.

The ranks compare plans, random draws, calls of operators with their numbers, the arguments of `distribute_tensor`,
`from_local` and `parallelize`, local shapes, and the values that `from_local` and the gradients of `to_local` declare
replicated. The variable is read when something is first prepared to run: set it for the whole program.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import isqrt
from struct import pack, unpack

import torch
from torch import Tensor

from dshard.comm.peer_failure import is_from_peer, wait_for
from dshard.comm.rank_tensors import are_simulated, by_rank, has_data, plain
from dshard.comm.runtime import Group, Runtime, group_with_data
from dshard.comm.scatter_shards import device_of
from dshard.comm.traced_collectives import traced
from dshard.comm.transport import bytes_of
from dshard.comm.user_code import user_line
from dshard.errors import LayoutError, MeshError, PeerError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Replicate
from dshard.redistribute import Plan
from dshard.torch_private import AllgatherOptions

WIDTH = 512
"""Bytes of each text that the ranks exchange."""


def enabled() -> bool:
    """Whether the debug mode is on, in which the ranks compare their next steps."""
    return os.environ.get("DSHARD_DEBUG", "0") not in ("", "0")


def patience() -> float:
    """Seconds that a rank waits for the others when they compare."""
    return float(os.environ.get("DSHARD_DEBUG_SECONDS", "300"))


def compare(plan: Plan, runtime: Runtime) -> None:
    """Check that every rank of the mesh is about to run the same plan."""
    compare_on(plan_text(plan), runtime.group(runtime.mesh.names), device_of(runtime.mesh))


def plan_text(plan: Plan) -> str:
    """The text of a plan that the ranks compare."""
    return f"{tuple(plan.shape)} {plan}"


def compare_on(text: str, group: Group, device: torch.device) -> None:
    """Check that every rank of the group is about to run the same plan, which `text` describes."""
    listed = _differences(text, group, device, "run")
    if listed:
        raise MeshError(f"the ranks are about to run different plans, so their programs have diverged: {listed}")


def compare_draws(text: str, mesh: Mesh) -> None:
    """In debug mode, check that every rank of the mesh is about to draw the same random numbers."""
    listed = _mesh_differences(text, mesh, "make")
    if listed:
        raise MeshError(
            "the ranks are about to draw different random numbers, so their seeds or their programs have diverged: "
            f"{listed}; call dshard.manual_seed with one seed on all of them"
        )


def compare_calls(text: str, mesh: Mesh, *, contents: Tensor | None = None) -> None:
    """In debug mode, check that every rank of the mesh makes the same call, with the same `contents`."""
    if not enabled() or (contents is not None and traced(contents)):
        return
    if contents is not None and type(contents.detach()) is Tensor and has_data(contents):
        text = f"{text}, checksum {checksum(contents):016x}"
    listed = _mesh_differences(text, mesh, "call")
    if listed:
        raise MeshError(
            f"the ranks make different calls, which all ranks of a mesh must make alike: {listed}; give every rank the "
            "same arguments and the same order of calls, and what differs by rank as parts, with DTensor.from_local"
        )


def checksum(x: Tensor) -> int:
    """A number that another tensor of this shape and dtype has only by a chance of about 2**-64.

    >>> checksum(torch.zeros(3)) == checksum(torch.zeros(3)), checksum(torch.ones(3)) == checksum(torch.zeros(3))
    (True, False)
    """
    return int(_sum_of_bits(x).item()) % 2**64


def _sum_of_bits(x: Tensor) -> Tensor:
    flat = bytes_of(x.detach().resolve_neg().reshape(-1))
    words = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    places = torch.arange(1, len(words) + 1, device=x.device) * _ODD
    mixed = (words ^ places) * _ODD
    mixed = (mixed ^ (mixed >> 29)) * (places | 1)
    return mixed.sum()


def digest(x: Tensor) -> Tensor:
    """Three integers on the device of `x`: of its bits, or of floats a norm and two projections, which hardly round.

    The projections add sums along rows and columns of a square, so that it takes little memory.
    """
    if not (x.is_floating_point() or x.is_complex()):
        total = _sum_of_bits(x)
        return torch.stack([total, total, total])
    flat = (torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()).reshape(-1)
    flat = (flat if x.itemsize > 1 else flat.float()).nan_to_num(2.0, 1.0, -1.0)
    flat = flat.clamp(-1e140, 1e140) if flat.dtype == torch.float64 else flat  # of which squares can be added
    square = flat[: len(flat) - len(flat) % (width := isqrt(len(flat)) or 1)].view(-1, width)
    sums = torch.cat([square.sum(dim, dtype=torch.float64) for dim in (0, 1)] + [flat[square.numel() :].double()])
    angles = torch.arange(1, len(sums) + 1, device=x.device, dtype=torch.float64).mul(_TURN)
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.stack([norm, (sums * angles.cos()).sum(), (sums * angles.sin()).sum()]).view(torch.int64)


def are_alike(digests: Iterable[Sequence[int]], dtype: torch.dtype, limit: float | None = None) -> bool:
    """Whether digests of tensors of this dtype are equal, but for rounding: floats up to `limit` of their norm."""
    first, *others = digests
    if not (dtype.is_floating_point or dtype.is_complex):
        return all(tuple(each) == tuple(first) for each in others)
    expected = unpack("3d", pack("3q", *first))
    allowed = (torch.finfo(dtype).eps ** 0.5 if limit is None else limit) * expected[0]
    return all(
        abs(a - b) <= allowed for each in others for a, b in zip(expected, unpack("3d", pack("3q", *each)), strict=True)
    )


def compare_replicas(x: Tensor, layout: Layout, what: str, way_out: str) -> None:
    """In debug mode, check that the ranks have equal tensors `x` along the axes on which `layout` replicates.

    They compare a norm and a random projection, so tensors that differ by rounding count as equal.
    """
    mesh = layout.mesh
    axes = [name for name, placement in zip(mesh.names, layout.placements, strict=True) if placement == Replicate()]
    if not enabled() or not axes or mesh.size == 1 or not has_data(x):
        return
    digests = _digests(x.detach(), mesh)
    for first, rank in ((mesh.group(axes, at)[0], mesh.rank(at)) for at in mesh.coordinates() if digests):
        if not are_alike([digests[first], digests[rank]], x.dtype):
            raise LayoutError(
                f"{what}, [{layout}], is not the same on rank {first} and rank {rank}, though it is replicated along "
                f"{', '.join(axes)} ({user_line()}): {way_out}"
            )


def _digests(x: Tensor, mesh: Mesh) -> dict[int, list[int]]:
    """The digest of each rank's tensor; empty if the ranks cannot compare them."""
    if are_simulated([x]):
        with plain():
            return {rank: digest(part).tolist() for rank, part in by_rank(x, mesh).items()}
    group = group_with_data(mesh)
    if group is None:
        return {}
    texts = _gather_texts("{} {} {}".format(*digest(x).tolist()), group, device_of(mesh))
    return {rank: [*map(int, text.split())] for text, ranks in texts.items() for rank in ranks}


_TURN = 2.399963229728653
"""The golden angle, by which the weights of a projection turn from element to element."""

_ODD = -7046029254386353131
"""2**64 divided by the golden ratio, as Knuth's multiplicative hashing has it, as a signed number."""


def _mesh_differences(text: str, mesh: Mesh, verb: str) -> str:
    """The different texts of the mesh's ranks, each with its ranks; "" if all agree or debug mode is off."""
    group = group_with_data(mesh) if enabled() else None
    return "" if group is None else _differences(text, group, device_of(mesh), verb)


def _differences(text: str, group: Group, device: torch.device, verb: str) -> str:
    texts = _gather_texts(text, group, device)
    return "; ".join(f"ranks {ranks} {verb} {text}" for text, ranks in texts.items()) if len(texts) > 1 else ""


def _gather_texts(text: str, group: Group, device: torch.device) -> dict[str, list[int]]:
    """Exchange the texts of the ranks of the group; return the ranks of each different text."""
    row = _row(text)
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    rows = mine.new_empty(len(group.ranks) * WIDTH)
    limit = AllgatherOptions()
    limit.timeout = timedelta(seconds=patience())
    try:
        wait_for(group.process_group._allgather_base(rows, mine, limit), group)
        rows = rows.view(-1, WIDTH).cpu()
    except RuntimeError as error:
        if is_from_peer(error) and not isinstance(error, PeerError):
            raise  # what an operator has raised on another rank
        others = [rank for rank in group.ranks if rank != group.ranks[group.index]]
        raise MeshError(
            f"rank {group.ranks[group.index]} is about to run or call {text} ({user_line()}), and not all of ranks "
            f"{others} came to compare it within {patience():g} s (DSHARD_DEBUG_SECONDS): one of them has ended, waits "
            f"for something else, or calls one operator less ({str(error).splitlines()[0]})"
        ) from error
    ranks_by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text_row in zip(sorted(group.ranks), rows, strict=True):
        ranks_by_text[bytes(text_row.tolist()).decode(errors="replace").strip()].append(rank)
    return ranks_by_text


def _row(text: str) -> bytes:
    """The text as WIDTH bytes; a longer one is cut, and a digest stands for the rest."""
    row = text.encode()
    if len(row) > WIDTH:
        digest = hashlib.blake2b(row, digest_size=8).hexdigest().encode()
        row = row[: WIDTH - len(digest) - 4] + b"... " + digest
    return row.ljust(WIDTH)
