"""Process groups by their ranks, and the state of this process on the world of all ranks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dshard.comm.backends import Backend
from dshard.errors import MeshError
from dshard.layout import Layout, Shape
from dshard.torch_private import SEEN


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective, in the order of the mesh, and their process group.

    torch sorts the ranks of a process group: `slots` are the positions of `ranks` there, or None where both orders
    agree. `hosts` is the number of hosts that have some of the ranks, one where it is unknown. `backend` says
    what the process group can do. `waits` has one item, which counts the waits of this process on it.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup
    backend: Backend
    slots: tuple[int, ...] | None = None
    hosts: int = 1
    waits: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)

    @property
    def spread(self) -> bool:
        """Whether the group spans several hosts, some with several of its ranks, which share a link."""
        return 1 < self.hosts < len(self.ranks)

    @property
    def name(self) -> str:
        """The name of the process group in torch's functional collectives."""
        return self.process_group.group_name

    @property
    def key(self) -> str:
        """The name of the process group that is the same on all its ranks."""
        return f"{self.name}/{','.join(map(str, sorted(self.ranks)))}"

    def __str__(self) -> str:
        along = f"along {', '.join(self.axes)}" if self.axes else "between meshes"
        return f"{along} of ranks {', '.join(map(str, self.ranks))}"


def hosts_of(ranks: Sequence[int], local: str) -> int:
    """The number of hosts with `local` ranks each that have some of `ranks`; one where `local` is no number.

    >>> hosts_of((0, 1, 2, 3), "2"), hosts_of((0, 2), "2"), hosts_of((0, 1), "2"), hosts_of((0, 1), "")
    (2, 2, 1, 1)
    """
    return len({rank // int(local) for rank in ranks}) if local.isdecimal() and int(local) else 1


class LocalShape(NamedTuple):
    """The shape and dtype of a rank's local tensor."""

    shape: Shape
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


@dataclass(slots=True)
class Worlds:
    """The current process group of all ranks, a count of such groups, and this process's state on the current one.

    `groups` has process groups by ranks and tag, `named` the groups of meshes by the name of the process group,
    `meshes` the meshes that `init_device_mesh` made, by its arguments. `waits` counts the waits on each by
    `Group.key`, `broken` the groups between meshes that were broken off, and `failures` the errors that this rank has
    published. `strayed` is the text of an error that other ranks raised because this rank
    published it. `even_parts` has the shapes that were assumed on all ranks, by call and layout, with their numbers.
    """

    world: Any = None
    count: int = 0
    groups: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = field(default_factory=dict)
    named: dict[str, Group] = field(default_factory=dict)
    meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = field(default_factory=dict)
    waits: dict[str, list[int]] = field(default_factory=dict)
    broken: Counter[tuple[int, ...]] = field(default_factory=Counter)
    failures: int = 0
    strayed: str | None = None
    even_parts: dict[tuple[str, Layout], dict[LocalShape, int]] = field(default_factory=dict)

    def of(self, world: object) -> Worlds:
        """Return the state for `world`, reset if it is another world than before."""
        if world is not self.world:
            self.world, self.count, self.groups, self.waits = world, self.count + 1, {}, {}
            self.named, self.meshes, self.even_parts = {}, {}, {}
            self.broken, self.failures, self.strayed = Counter(), 0, None
        return self


WORLDS = Worlds()
"""The process groups of this process."""


def group_with_shared_waits(
    axes: tuple[str, ...],
    ranks: tuple[int, ...],
    rank: int,
    process_group: dist.ProcessGroup,
    backend: Backend,
    slots: tuple[int, ...] | None = None,
    hosts: int = 1,
) -> Group:
    """A group whose counter of waits is shared by the groups of all meshes that have its process group."""
    group = Group(axes, ranks, ranks.index(rank), process_group, backend, slots, hosts)
    world = this_world()
    group = replace(group, waits=world.waits.setdefault(group.key, group.waits))
    world.named.setdefault(group.name, group)
    return group


def this_world() -> Worlds:
    """Return the state of this process on the current process group of all ranks."""
    return WORLDS.of(dist.group.WORLD)


def backend_name(process_group: dist.ProcessGroup | None = None) -> str:
    """torch's name of the backend of a process group, or of the world.

    A world made without naming a backend, as by `init_device_mesh` under torchrun, is "undefined" to torch: it has
    backends by type of device, such as "cpu:gloo,cuda:nccl".
    """
    name = dist.get_backend(process_group)
    return str(dist.get_backend_config(process_group)) if name == dist.Backend.UNDEFINED else name


def process_group_of(
    ranks: tuple[int, ...], world: object, tag: int = 0, backend: str | None = None
) -> dist.ProcessGroup:
    """The process group of `ranks`, created at its first use by these ranks alone, all together.

    torch would name it by the number of groups of this process, and ranks with different numbers would wait forever: so
    it is named by its ranks. Compiled graphs, which are cached on disk, refer to it by that name.
    """
    if not tag and len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    worlds = WORLDS.of(world)
    process_group = worlds.groups.get((ranks, tag))
    if process_group is None:
        which = f"{worlds.count}{f'.{tag}' if tag else ''}"
        process_group = worlds.groups[ranks, tag] = _new_group(ranks, which, backend)
    return process_group


def _new_group(ranks: tuple[int, ...], which: str, backend: str | None) -> dist.ProcessGroup:
    """Create a process group of these ranks without the others, under a name of our own.

    torch has arguments for neither: its functions that find a name, and a communicator to split, are replaced, for this
    thread alone. A split would be a call of all ranks of the world.
    """
    name = f"dshard:{','.join(map(str, ranks))}:{which}"
    with _answered(_process_group_name=name, _get_split_source=None):
        process_group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    if process_group.group_name != name:
        raise MeshError(
            f"torch {torch.__version__} named a process group {process_group.group_name!r}, not {name!r}: its ranks "
            f"might wait for each other; install torch {SEEN}, or a dshard for your torch"
        )
    return process_group


@contextlib.contextmanager
def _answered(**answers: object) -> Iterator[None]:
    """Make these functions of torch return these answers in this thread within the block."""
    token = _ANSWERS.set(answers)
    _REPLACED.begin()
    try:
        yield
    finally:
        _REPLACED.end()
        _ANSWERS.reset(token)


_ANSWERS: ContextVar[dict[str, object]] = ContextVar("answers of torch's functions")
"""The results of torch's functions in this thread, by name, while it makes a group."""


class _Replaced:
    """Functions of torch that stay replaced while any thread creates a group.

    Threads create groups concurrently, and each waits for other ranks: so no lock is held meanwhile, and the last
    thread that ends restores the functions.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.lock = Lock()
        self.threads = 0
        self.originals: dict[str, Callable[..., object]] = {}

    def begin(self) -> None:
        with self.lock:
            self.threads += 1
            if self.threads == 1:
                self.originals = {name: getattr(distributed_c10d, name) for name in self.names}
                for name, original in self.originals.items():
                    setattr(distributed_c10d, name, partial(_answer, name, original))

    def end(self) -> None:
        with self.lock:
            self.threads -= 1
            if self.threads == 0:
                for name, original in self.originals.items():
                    setattr(distributed_c10d, name, original)


_REPLACED = _Replaced("_process_group_name", "_get_split_source")


def _answer(name: str, original: Callable[..., object], *args: object, **kwargs: object) -> object:
    answers = _ANSWERS.get(None)
    return original(*args, **kwargs) if answers is None else answers[name]


def disconnect(group: Group) -> None:
    """Close this rank's gloo connections in a group that is out of step: waits of its other ranks then fail."""
    here = group.process_group.rank()
    for peer in range(len(group.ranks)):
        if peer != here:
            with contextlib.suppress(
                RuntimeError
            ):  # a receive that times out makes gloo close all connections of the group
                unsent = torch.empty(1, device="cpu")
                group.process_group.recv([unsent], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


_NEVER_SENT = 2**25  # the tag of no message
