"""Save and load by torch.distributed.checkpoint; checkpoints are replaced atomically, errors raised on all ranks.

torch's planners report progress here.
"""

from __future__ import annotations

import io
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import LBFGS, Optimizer

from dshard import comm
from dshard.checkpoint.metadata_file import version
from dshard.checkpoint.storage import Reader, Writer
from dshard.core.moves import with_partials_reduced
from dshard.errors import ArgumentError, CheckpointError
from dshard.layout import format_of
from dshard.tensor import DTensor
from dshard.torch_private import late, pytree
from dshard.validate import check_type


def read_value(name: str, stream: Any, current: Any) -> Any:
    """Read a value of torch.save that needs only globals that torch.load allows, or that `current` is pickled with."""
    try:
        return torch.load(stream, weights_only=True)
    except pickle.UnpicklingError:
        stream.seek(0)
    allowed, pickled, refused = set[tuple[str, str]](), io.BytesIO(), set[str]()
    torch.save(current, pickled)
    pickled.seek(0)
    _load(pickled, lambda module, name: allowed.add((module, name)))

    def check(module: str, name: str) -> None:
        if (module, name) not in allowed:
            refused.add(f"{module}.{name}")
            raise pickle.UnpicklingError

    try:
        return _load(stream, check)
    except Exception as error:  # whatever unpickling may raise
        reason = f"it was pickled with {refused.pop()}" if refused else f"{type(error).__name__}: {error}"
    raise CheckpointError(
        f"{name!r} is not read, {reason}: to read a value of a class of its own, let the state that it is loaded into "
        "have such a value there, or name the class to torch.serialization.add_safe_globals"
    )


def _load(stream: Any, heed: Callable[[str, str], object]) -> Any:
    """Load a value of torch.save; `heed` is told the module and the name of each global in its pickle."""

    class Heeding(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            heed(module, name)
            return super().find_class(module, name)

    module = SimpleNamespace(__name__="pickle", Unpickler=Heeding, load=None)  # torch's form, without older ones
    return torch.load(stream, weights_only=False, pickle_module=module)


_set_element: Callable[..., None] = late("torch.distributed.checkpoint._traverse.set_element")

Report = Callable[[int, int], object]
"""Called with the bytes that this rank has written or read, and with their total."""


class SavePlanner(DefaultSavePlanner):
    """Planner of a save that reports progress for each tensor that this rank writes."""

    def __init__(self, report: Report | None) -> None:
        super().__init__()
        self.report, self.done, self.total = report, 0, 0

    def finish_plan(self, new_plan: Any) -> Any:
        """Note the bytes of this rank's plan."""
        self.total = sum(item.tensor_storage_size() or 0 for item in new_plan.items)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        """The data of one item."""
        self.done += write_item.tensor_storage_size() or 0
        if self.report is not None:
            self.report(self.done, self.total)
        return super().resolve_data(write_item)


class LoadPlanner(DefaultLoadPlanner):
    """Planner of a load that reports progress for each region that this rank has read."""

    def __init__(self, current: Mapping[str, object], report: Report | None) -> None:
        super().__init__()
        self.current = current  # torch forgets values that are no tensors when it sets the planner up
        self.report, self.done, self.total = report, 0, 0

    def finish_plan(self, central_plan: Any) -> Any:
        """Note the bytes of this rank's plan."""
        self.total = sum(prod(item.lengths) * self._itemsize(item.dest_index.fqn) for item in central_plan.items)
        return super().finish_plan(central_plan)

    def _itemsize(self, name: str) -> int:
        assert self.metadata is not None
        match self.metadata.state_dict_metadata[name]:
            case TensorStorageMetadata(properties=properties):
                return properties.dtype.itemsize
            case _:
                return 0

    def load_bytes(self, read_item: Any, value: object) -> None:
        """Read a value that is no tensor, without executing anything that the user has not named."""
        name = read_item.dest_index.fqn
        loaded = read_value(name, value, self.current.get(name))
        _set_element(self.original_state_dict, self.mappings[name], loaded)

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """Report that this region has been read."""
        super().commit_tensor(read_item, tensor)
        self.done += tensor.nbytes
        if self.report is not None:
            self.report(self.done, self.total)


@dataclass(frozen=True, slots=True, eq=False)
class StateLeaf:
    """A value of the state, by its container and key."""

    name: str
    container: Any
    key: Any

    @property
    def value(self) -> Any:
        """The current value in the container."""
        return self.container[self.key]


def leaves(state: Mapping[str, object]) -> dict[str, StateLeaf]:
    """The leaves of a state by name: of dicts, and of lists that hold tensors or dicts.

    >>> list(leaves({"model": {"w": 1}, "groups": [{"lr": 0.1, "params": [0, 1]}]}))
    ['model.w', 'groups.0.lr', 'groups.0.params']
    """
    by_name: dict[str, StateLeaf] = {}
    for leaf in _leaves("", state):
        if leaf.name in by_name:
            raise CheckpointError(f"two values of the state are called {leaf.name!r}: rename one of them")
        by_name[leaf.name] = leaf
    return by_name


def _leaves(prefix: str, container: Any) -> Iterator[StateLeaf]:
    pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in list(pairs):
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) or (isinstance(value, list) and any(map(_is_inner, value))):
            yield from _leaves(f"{name}.", value)
            continue
        if isinstance(value, tuple | set) and any(isinstance(item, DTensor) for item in value):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} of distributed tensors: put them into a list or a dict"
            )
        if isinstance(value, Stateful):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} inside the state: put it at the top, or give its state_dict()"
            )
        yield StateLeaf(name, container, key)


def _is_inner(value: object) -> bool:
    return isinstance(value, Tensor | Mapping) or (isinstance(value, list) and any(map(_is_inner, value)))


Group = dist.ProcessGroup | None
SHOWN = 8
"""The most problems that one error lists."""
TRIES, PAUSE = 100, 0.1
"""How often a load begins again when another checkpoint is published, and seconds for all ranks to see it."""


def save(
    state: Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    progress: Report | None = None,
    process_group: Group = None,
) -> None:
    """Save a state to the directory `path`, replacing a checkpoint there, on all ranks of the process group together.

    `state` holds tensors, distributed or plain, other values that can be pickled, dicts and lists of these, and objects
    with a `state_dict`: modules, optimizers. Each shard is written once, by one of the ranks that hold it; partial
    reductions are completed first. Plain tensors and values are assumed to be equal on all ranks.

    The directory is new, empty, or a checkpoint. The new checkpoint is written beside the former one and replaces it
    when all ranks have written, so that `load` finds either of them at any time; other files in the directory are not
    touched. If a rank fails or dies before that, the former checkpoint stays, and the other ranks raise within the
    time limit of the process group. `progress(done, total)` is called with this rank's bytes, as by
    `dshard.report.checkpoint_progress`.

    Raises:
        CheckpointError: the ranks give different paths, the path is in use by something else, writing failed, or a
            rank failed.
    """
    check_state(state)
    check_path(path)
    path, doing = agreed_path(path, "save to", process_group), f"cannot save to {path}"
    flat = {name: leaf.value for name, leaf in leaves(complete_partials(states(state))).items()}
    with failing(f"saving to {path}: what was there before stays as it was"):
        writer = Writer(path)
        on_first_rank(writer.prepare, doing, process_group)
        try:
            state_dict_saver.save(
                flat, storage_writer=writer, planner=SavePlanner(progress), process_group=process_group
            )
        except BaseException:
            if comm.group_rank(process_group) == 0:
                writer.abandon()
            raise


def load(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    progress: Report | None = None,
    process_group: Group = None,
) -> None:
    """Load a checkpoint of `save`, or of torch.distributed.checkpoint, from `path` into a state, on all ranks together.

    `state` gives the names and layouts to load: each rank reads only its shards, from any saved layout and mesh.
    Tensors are written in place; other values are replaced; modules and optimizers load their state dicts. Parameters
    without a state in an optimizer first get one, by a step with gradients and a learning rate of zero; those that have
    none in the checkpoint, as they had no gradient when it was saved, begin anew, with a warning. Names beyond `state`
    are ignored. Names, shapes and dtypes are compared before anything is read, and the bytes read with their
    checksums. A concurrent save to the same path is harmless: all ranks read the same version. Nothing in the
    checkpoint is executed: values other than tensors may name the globals that torch.load allows by default, those
    passed to `torch.serialization.add_safe_globals`, and those of the pickled value in `state`.

    Raises:
        CheckpointError: the ranks give different paths, there is no such checkpoint, or it has other names, shapes or
            dtypes, is damaged, or cannot be read.
    """
    check_state(state)
    check_path(path)
    path = agreed_path(path, "load from", process_group)
    for value in state.values():
        if isinstance(value, Optimizer):
            _give_state(value)
    nested = states(state)
    by_name = leaves(nested)
    optional = {
        f"{key}.state.{i}.": (key, i)
        for key, value in state.items()
        if isinstance(value, Optimizer)
        for i in nested[key]["state"]
    }
    with failing(f"loading from {path}"):
        flat = _load_one_version(by_name, tuple(optional), path, progress, process_group)
    for name, leaf in by_name.items():
        if name in flat and not isinstance(leaf.value, Tensor):
            leaf.container[leaf.key] = flat[name]
    absent = [optional[prefix] for prefix in absent_prefixes(optional, flat)]
    for key, i in absent:
        del nested[key]["state"][i]
    if absent:
        _warn_of_absent_states(state, absent)
    for key, value in state.items():
        if isinstance(value, Stateful):
            value.load_state_dict(nested[key])
        else:
            state[key] = nested[key]


def _load_one_version(
    by_name: dict[str, StateLeaf], optional: Sequence[str], path: Path, progress: Report | None, group: Group
) -> dict[str, Any]:
    """Read the leaves from the same version of the checkpoint on all ranks, despite concurrent saves.

    Those whose names begin with one of `optional` are left out where the checkpoint has none of that prefix.
    """
    failed: CheckpointException | None = None
    failed_versions: set[object] = set()
    for _ in range(TRIES):
        reader = Reader(path)
        problems, saved = _problems(reader, by_name, optional)  # reads the metadata
        here = None if reader.known is None else version(reader.known)
        versions = set(comm.gather_objects((reader.known is not None, here), group))
        if len(versions) > 1:
            time.sleep(PAUSE)  # A rank has read before another checkpoint was published, and another rank since.
            continue
        agree(problems, f"cannot load from {path}", group)
        if failed is not None and versions == failed_versions:
            raise failed
        flat = {name: leaf.value for name, leaf in by_name.items() if name in saved}
        planner = LoadPlanner(flat.copy(), progress)
        try:
            with reader.files.stack:
                state_dict_loader.load(flat, storage_reader=reader, planner=planner, process_group=group)
            return flat
        except CheckpointException as error:
            if not any(isinstance(cause, FileNotFoundError) for cause, _ in error.failures.values()):
                raise
            failed, failed_versions = error, versions  # Another checkpoint has replaced this one, or it is damaged.
    raise CheckpointError(
        f"cannot load from {path}: {TRIES} times, ranks saw different checkpoints there; give a path on a file system "
        "that all ranks share, and save to it less often"
    )


def check_state(state: object) -> None:
    """Refuse a state that is no dict of values by name."""
    way_out = "give a dict, as in {'model': model, 'optimizer': optimizer}, and the path after it"
    check_type(state, dict, "the state of a checkpoint", way_out)


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a value that is no path."""
    check_type(path, str | os.PathLike, "the path of a checkpoint", "give that of a directory")
    if not str(path):
        raise ArgumentError("the path of a checkpoint is empty: give that of a directory")


def states(state: Mapping[str, object]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def complete_partials(state: object) -> Any:
    """The state with all partial reductions completed."""
    return pytree.tree_map_only(
        DTensor, lambda x: with_partials_reduced(x.detach(), "checkpoint") if x.layout.partial_axes() else x, state
    )


def _give_state(optimizer: Optimizer) -> None:
    """Let the optimizer create the states that it lacks as in its first step, without changing parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    lacking = [p for p in parameters if p not in optimizer.state]
    if not lacking or (optimizer.state and isinstance(optimizer, LBFGS)):  # which has one state for all
        return
    grads, rates = [p.grad for p in parameters], [group.get("lr") for group in optimizer.param_groups]
    with torch.no_grad():
        for p in parameters:
            p.grad = None
        for p in lacking:
            p.grad = torch.zeros_like(p)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad


def _warn_of_absent_states(state: Mapping[str, Any], absent: Sequence[tuple[str, Any]]) -> None:
    """Name the parameters of which a checkpoint has no state of their optimizer."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    numbered = {key: [p for group in state[key].param_groups for p in group["params"]] for key, _ in absent}
    shown = [f"{key}: {names.get(id(numbered[key][i]), i)}" for key, i in absent]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    warnings.warn(
        f"the checkpoint has no state of an optimizer for {len(shown)} parameters ({', '.join(shown[:SHOWN])}{more}), "
        "which had no gradient when it was saved: their states begin anew",
        stacklevel=3,
    )


def absent_prefixes(prefixes: Iterable[str], names: Iterable[str]) -> list[str]:
    """The `prefixes`, which end with dots, with which none of `names` begins."""
    present = {name[: i + 1] for name in names for i, letter in enumerate(name) if letter == "."}
    return [prefix for prefix in prefixes if prefix not in present]


def _problems(
    reader: Reader, by_name: dict[str, StateLeaf], optional: Sequence[str]
) -> tuple[list[str], Mapping[str, Any]]:
    """Messages about leaves that do not match the checkpoint, and its entries by name."""
    try:
        saved = reader.read_metadata().state_dict_metadata
    except (FileNotFoundError, NotADirectoryError):
        what = "is no checkpoint: it has no file .metadata" if Path(reader.path).exists() else "does not exist"
        return [f"it {what}; give the directory that a checkpoint was saved to"], {}
    except (CheckpointError, OSError) as error:
        return [str(error)], {}
    problems = []
    absent = tuple(absent_prefixes(optional, saved))
    for name, leaf in by_name.items():
        if name.startswith(absent):
            continue
        entry, value = saved.get(name), leaf.value
        if entry is None:
            problems.append(f"it has no {name!r}; it has {format_of(sorted(saved)[:SHOWN])}")
        elif isinstance(entry, TensorStorageMetadata) != isinstance(value, Tensor):
            kinds = ("a tensor", "another value")
            here, there = kinds if isinstance(value, Tensor) else kinds[::-1]
            problems.append(f"{name!r} is {there} in the checkpoint and {here} here")
        elif isinstance(entry, TensorStorageMetadata):
            problems += misfits(name, entry.size, value)
            if tuple(entry.size) == tuple(value.shape) and entry.properties.dtype != value.dtype:
                problems.append(
                    f"{name!r} is {entry.properties.dtype} in the checkpoint and {value.dtype} here: "
                    "load it as it was saved, and convert it then"
                )
    return problems, saved


def misfits(name: str, shape: Sequence[int], value: Tensor, where: str = "checkpoint") -> Iterator[str]:
    """Messages that say why a tensor of this shape, in a checkpoint or file, cannot be loaded into `value`."""
    if tuple(shape) != tuple(value.shape):
        yield f"{name!r} has shape {tuple(shape)} in the {where} and {tuple(value.shape)} here"
    if isinstance(value, DTensor) and value.layout.partial_axes():
        yield f"{name!r} is to lie [{value.layout}], and a partial tensor cannot be loaded: use Shard or Replicate"


def agreed_path(path: str | os.PathLike[str], doing: str, group: Group) -> Path:
    """Check that all ranks give the same path, and return it."""
    paths = comm.gather_objects((os.fspath(path), os.path.abspath(path)), group)
    if "://" in paths[0][0]:
        raise CheckpointError(f"cannot {doing} {path}: give a path of a file system, which all ranks share")
    if len({absolute for _, absolute in paths}) > 1:
        first = next(rank for rank, (_, absolute) in enumerate(paths) if absolute != paths[0][1])
        raise CheckpointError(
            f"cannot {doing} different paths: rank 0 gives {paths[0][1]} and rank {first} gives {paths[first][1]}; "
            "give one path on all ranks, on a file system that they share"
        )
    return Path(path)


def agree(problems: list[str], doing: str, group: Group) -> None:
    """Raise the problems of any rank on all ranks."""
    all_problems = list(dict.fromkeys(problem for rank in comm.gather_objects(problems, group) for problem in rank))
    if all_problems:
        more = f"\n  ... and {len(all_problems) - SHOWN} more" if len(all_problems) > SHOWN else ""
        raise CheckpointError(f"{doing}:\n  " + "\n  ".join(all_problems[:SHOWN]) + more)


def on_first_rank(function: Callable[[], None], doing: str, group: Group) -> None:
    """Call the function on the first rank; if it fails, all ranks raise."""
    on_all_ranks(function if comm.group_rank(group) == 0 else lambda: None, doing, group)


def on_all_ranks(function: Callable[[], None], doing: str, group: Group) -> None:
    """Call the function on each rank; if it fails on any, all ranks raise."""
    problems = []
    try:
        function()
    except CheckpointError as error:
        problems = [str(error)]
    except Exception as error:  # Whatever it is, the other ranks wait for what is said here.
        problems = [f"rank {comm.group_rank(group)}: {type(error).__name__}: {error}"]
    agree(problems, doing, group)


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Raise failures within the block as a CheckpointError that names the action `doing`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        ranks = {rank: error for rank, (error, _) in failed.failures.items()}
        first = min(ranks)
        kind = "" if isinstance(ranks[first], CheckpointError) else f"{type(ranks[first]).__name__}: "
        raise CheckpointError(f"{doing}\nrank {first}: {kind}{ranks[first]}") from None
    except (RuntimeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{doing}\n{type(error).__name__}: {error}") from error
