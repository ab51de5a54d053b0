"""Save and load: torch.distributed.checkpoint, with checkpoints replaced at once and errors alike on all ranks."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from dshard import comm
from dshard.checkpoint.flat import Leaf, leaves
from dshard.checkpoint.planners import LoadPlanner, Report, SavePlanner
from dshard.errors import ArgumentError, CheckpointError
from dshard.layout import format_of
from dshard.ops.moving import settled
from dshard.tensor import DTensor
from dshard.validate import check_type

Group = dist.ProcessGroup | None
SHOWN = 8
"""Problems that one error lists."""


def save(
    state: dict[str, Any], path: str | os.PathLike[str], *, progress: Report | None = None, process_group: Group = None
) -> None:
    """Save a state to the directory `path`, in place of what is there, on all ranks of the process group together.

    `state` holds tensors, distributed or plain, other values that can be pickled, dicts and lists of these, and what
    has a `state_dict`: modules, optimizers. Each part is written once, by one of the ranks that hold it; pending
    reductions are completed for it. Plain tensors and values are taken to be alike on all ranks.

    The checkpoint is written beside `path` and takes its place when all ranks have written. Where a rank fails or dies
    before, what was at `path` stays as it was, and the other ranks raise within the time limit of the process group.
    `progress(done, total)` is called with this rank's bytes, as by `dshard.report.checkpoint_progress`.

    Raises:
        CheckpointError: something could not be written, or a rank failed.
    """
    check_state(state)
    path = _path(path)
    partial, previous = _beside(path, "partial"), _beside(path, "previous")
    flat = {name: leaf.value for name, leaf in leaves(settled_state(states(state))).items()}

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)

    def finish() -> None:
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        partial.rename(path)
        _sync(path.parent)
        shutil.rmtree(previous, ignore_errors=True)

    with failing(f"saving to {path}: what was there before stays as it was"):
        once(begin, process_group)
        state_dict_saver.save(
            flat,
            storage_writer=FileSystemWriter(partial),
            planner=SavePlanner(progress),
            process_group=process_group,
        )
        once(finish, process_group)


def load(
    state: dict[str, Any], path: str | os.PathLike[str], *, progress: Report | None = None, process_group: Group = None
) -> None:
    """Load into a state what `save`, or torch.distributed.checkpoint, has saved to `path`, on all ranks together.

    `state` says what to load and how it lies: each rank reads only what it holds, whatever layout and mesh it was
    saved from. Tensors are written to in place; other values are replaced; modules and optimizers get theirs. An
    optimizer that has made no step yet gets its state first, by a step with gradients and a learning rate of zero. What
    the checkpoint has beyond `state` is left alone. Everything is compared before anything is read.

    Raises:
        CheckpointError: there is no such checkpoint, or it has other names, shapes or dtypes, or cannot be read.
    """
    check_state(state)
    path = _path(path)
    for value in state.values():
        if isinstance(value, Optimizer):
            _give_state(value)
    nested = states(state)
    found = leaves(nested)
    with failing(f"loading from {path}"):
        reader = _Reader(_present(Path(path), process_group))
        agree(_problems(reader, found), path, process_group)
        flat = {name: leaf.value for name, leaf in found.items()}
        state_dict_loader.load(flat, storage_reader=reader, planner=LoadPlanner(progress), process_group=process_group)
    for name, leaf in found.items():
        if not isinstance(leaf.value, Tensor):
            leaf.container[leaf.key] = flat[name]
    for key, value in state.items():
        if isinstance(value, Stateful):
            value.load_state_dict(nested[key])
        else:
            state[key] = nested[key]


def check_state(state: object) -> None:
    """Refuse what is no dict of values by name.

    Raises:
        ArgumentError: with the way out.
    """
    way_out = "give a dict, as in {'model': model, 'optimizer': optimizer}, and the path after it"
    check_type(state, dict, "the state of a checkpoint", way_out)


def _path(path: str | os.PathLike[str]) -> Path:
    check_type(path, str | os.PathLike, "the path of a checkpoint", "give that of a directory")
    if not str(path):
        raise ArgumentError("the path of a checkpoint is empty: give that of a directory")
    return Path(path)


class _Reader(FileSystemReader):
    """Reads the metadata once."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is None:
            self.known = super().read_metadata(*args, **kwargs)
        return self.known


def states(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def settled_state(state: Any) -> Any:
    """The state with nothing pending."""
    return tree_map_only(DTensor, lambda x: settled(x.detach(), "checkpoint") if x.layout.partial_axes() else x, state)


def _give_state(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, as its first step does, and nothing else."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    grads, rates = [p.grad for p in parameters], [group.get("lr") for group in optimizer.param_groups]
    with torch.no_grad():
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad


def _beside(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}"


def _present(path: Path, group: Group) -> Path:
    """Where the checkpoint lies: in the moment in which `save` puts a new one in its place, beside it."""
    candidates = (path, _beside(path, "previous"))
    here = [str(p) for p in candidates if (p / ".metadata").is_file()]
    first: list[str] = comm.gather_objects(here, group)[0]
    if not first:
        what = "is no checkpoint: it has no file .metadata" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give the directory that a checkpoint was saved to")
    return Path(first[0])


def _problems(reader: _Reader, found: dict[str, Leaf]) -> list[str]:
    """What does not fit between the checkpoint and what is asked of it."""
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file may raise
        return [f"its file .metadata cannot be read: {type(error).__name__}: {error}"]
    problems = []
    for name, leaf in found.items():
        entry, value = saved.get(name), leaf.value
        if entry is None:
            problems.append(f"it has no {name!r}; it has {format_of(sorted(saved)[:SHOWN])}")
        elif isinstance(entry, TensorStorageMetadata) != isinstance(value, Tensor):
            kinds = ("a tensor", "another value")
            here, there = kinds if isinstance(value, Tensor) else kinds[::-1]
            problems.append(f"{name!r} is {there} in the checkpoint and {here} here")
        elif isinstance(entry, TensorStorageMetadata):
            problems += _differences(name, entry, value)
    return problems


def _differences(name: str, entry: TensorStorageMetadata, value: Tensor) -> Iterator[str]:
    if tuple(entry.size) != tuple(value.shape):
        yield f"{name!r} has shape {tuple(entry.size)} in the checkpoint and {tuple(value.shape)} here"
    elif entry.properties.dtype != value.dtype:
        yield (
            f"{name!r} is {entry.properties.dtype} in the checkpoint and {value.dtype} here: "
            "load it as it was saved, and convert it then"
        )
    if isinstance(value, DTensor) and value.layout.partial_axes():
        yield f"{name!r} is to lie [{value.layout}], and a pending reduction cannot be loaded: use Shard or Replicate"


def agree(problems: list[str], path: Any, group: Group) -> None:
    """Raise what any rank has found, on all ranks alike."""
    found = list(dict.fromkeys(problem for rank in comm.gather_objects(problems, group) for problem in rank))
    if found:
        more = f"\n  ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise CheckpointError(f"cannot load from {path}:\n  " + "\n  ".join(found[:SHOWN]) + more)


def once(function: Callable[[], None], group: Group) -> None:
    """Let the first rank call the function; whether it failed, all know."""
    failed = ""
    if comm.group_rank(group) == 0:
        try:
            function()
        except OSError as error:
            failed = str(error)
    failed = comm.gather_objects(failed, group)[0]
    if failed:
        raise RuntimeError(f"rank 0: {failed}")


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """What fails within the block is a CheckpointError that says what was being done."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        ranks = {rank: error for rank, (error, _) in failed.failures.items()}
        first = min(ranks)
        raise CheckpointError(f"{doing}\nrank {first}: {type(ranks[first]).__name__}: {ranks[first]}") from None
    except (RuntimeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{doing}\n{type(error).__name__}: {error}") from error


def _sync(directory: Path) -> None:
    """Have the names in a directory written to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
