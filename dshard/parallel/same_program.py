"""Whether the ranks of a model run one program: their plans, versions and hashes, and the generators of random numbers.

Numbers that the model's own code draws, with Python, numpy or torch, decide branches and count as replicated. States of
generators that differ are no error, for a program may never draw from them; a forward pass that does is refused.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import string_at
from functools import partial
from typing import TypeAlias
from zlib import crc32

import torch
from torch import Tensor, nn

from dshard.comm import gather_rows, has_only_shape, is_captured, leave_word, own_coordinate, simulated_ranks, warn_user
from dshard.core.comparisons import EVERY, comparisons_on
from dshard.errors import LayoutError
from dshard.mesh import Coordinate, Mesh
from dshard.parallel.batch_rows import data_coordinate
from dshard.parallel.plan_values import ModelPlan
from dshard.torch_private import disable_modes, is_transforming
from dshard.version import __version__

RowsOfRanks: TypeAlias = Mapping[Coordinate, tuple[int, ...]]
"""The numbers of each rank, by its coordinate."""


def _state_of_torch() -> int:
    """A digest of torch's generators of the CPU, without the word where dshard leaves marks, and of the current GPU."""
    with disable_modes():
        states = [torch.default_generator.get_state()[8:]]
        states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return crc32(b"".join(string_at(state.data_ptr(), state.numel()) for state in states))


def _state_of_numpy() -> int:
    """A digest of the state of numpy's global generator; 0 before numpy is imported."""
    numpy = sys.modules.get("numpy.random")
    return 0 if numpy is None else crc32(pickle.dumps(numpy.get_state(legacy=False)))


GENERATORS: Mapping[str, tuple[Callable[[], int], str]] = {
    "torch's generator": (_state_of_torch, "torch.manual_seed(seed)"),
    "Python's generator": (lambda: crc32(pickle.dumps(random.getstate())), "random.seed(seed)"),
    "numpy's generator": (_state_of_numpy, "numpy.random.seed(seed)"),
}
"""The generators of random numbers of a process: a digest of the state of each, and the line that seeds it."""


def states() -> list[int]:
    """A digest of the state of each of `GENERATORS`."""
    return [state() for state, _ in GENERATORS.values()]


def ranks_alike(of_rank: RowsOfRanks, plan: ModelPlan, per_data_rank: bool) -> list[RowsOfRanks]:
    """The numbers by groups of ranks that must have the same: all, or if `per_data_rank` those of each data rank."""
    groups: dict[Coordinate, dict[Coordinate, tuple[int, ...]]] = {}
    for at, row in of_rank.items():
        groups.setdefault(data_coordinate(plan, at) if per_data_rank else (), {})[at] = row
    return list(groups.values())


def ranks_by_value(of_rank: RowsOfRanks, columns: Sequence[int], mesh: Mesh) -> str:
    """The ranks, by what they have in these columns: "ranks [0, 2] and ranks [1]"."""
    alike: dict[tuple[int, ...], list[int]] = {}
    ranks = dict(zip(mesh.coordinates(), mesh.ranks, strict=True))
    for at, row in of_rank.items():
        alike.setdefault(tuple(row[c] for c in columns), []).append(ranks[at])
    return " and ".join(f"ranks {each}" for each in alike.values())


def differing(of_rank: RowsOfRanks, first: int, plan: ModelPlan, per_data_rank: bool) -> dict[str, str]:
    """The generators whose states, in the columns from `first` on, differ where they must not, each with its ranks."""
    out = {}
    for i, name in enumerate(GENERATORS, start=first):
        for group in ranks_alike(of_rank, plan, per_data_rank):
            if len({row[i] for row in group.values()}) > 1:
                out[name] = ranks_by_value(group, [i], plan.mesh)
    return out


_SAMPLE = 64
"""The values of a parameter that are compared; all would take several passes over the memory of a model."""


def digests_of(model: nn.Module) -> tuple[int, int]:
    """Digests of a model before it is laid out: of its modules and tensors, in their order, and of first values."""
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    tensors = (*model.named_parameters(), *model.named_buffers())
    forms = [(name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in tensors]
    return crc32(str((modules, forms)).encode()), sample_of(model.parameters())


def sample_of(parameters: Iterable[Tensor]) -> int:
    """A digest of the first values of plain parameters: models that were seeded apart have others."""
    rows = dict[torch.device, list[Tensor]]()
    for x in parameters:
        if type(x) is nn.Parameter and x.layout == torch.strided and x.numel():
            row = x.detach().as_strided((min(_SAMPLE, x.shape[-1] if x.dim() else 1),), x.stride()[-1:] or (1,))
            rows.setdefault(x.device, []).append(row.contiguous().view(torch.uint8))
    samples = [torch.cat(own) for own in rows.values() if not has_only_shape(own[0])]
    return crc32(bytes([byte for own in samples for byte in own.tolist()]))  # one copy from a device


def compare_programs(
    plan: ModelPlan, per_data_rank: bool, seed_alike: bool, digests: tuple[int, int]
) -> dict[str, str]:
    """Compare the programs of the ranks, by one message, and return the generators that differ, each with its ranks.

    `digests` are those of the model. With `seed_alike` Python's generator and numpy's are seeded by the state
    of the first rank's.
    """
    tensors = (*plan.inputs.items(), *plan.parameters.items(), *plan.outputs.items())
    texts = (plan.strategy, plan.mesh, *sorted(map(str, tensors)))
    versions = f"torch {torch.__version__}, dshard {__version__}, Python {sys.version.partition(' ')[0]}"
    own = [crc32(str(texts).encode()), crc32(versions.encode()), hash("dshard"), *digests, *states()]
    of_rank = gather_rows(own, plan.mesh, is_check=True)
    if len({row[0] for row in of_rank.values()}) > 1:
        raise LayoutError(
            f"the examples of the ranks lead to different plans, here {plan.strategy!r}: give the same one on all ranks"
        )
    if len({row[3] for row in of_rank.values()}) > 1:
        raise LayoutError(
            f"{ranks_by_value(of_rank, [3], plan.mesh)} give parallelize models whose modules, parameters or buffers "
            "differ, in their order, names, classes, shapes, dtypes or requires_grad, so what they send would be "
            "mispaired: make the same model on all ranks"
        )
    if len({row[1] for row in of_rank.values()}) > 1:
        ranks = ranks_by_value(of_rank, [1], plan.mesh)
        warn_user(f"{ranks} run other versions, here {versions}: install the same on all hosts", plan.mesh)
    if len({row[2] for row in of_rank.values()}) > 1:
        warn_user(
            "the ranks hash strings differently, so loops over sets of strings go in another order on each, and what "
            "they send may be mispaired: start them with PYTHONHASHSEED=0 in the environment",
            plan.mesh,
        )
    if len({row[4] for row in of_rank.values()}) > 1:
        warn_user(
            f"{ranks_by_value(of_rank, [4], plan.mesh)} give parallelize other parameters, and each keeps its own: "
            "call torch.manual_seed with one seed on all ranks before the model is made, or load one state into it",
            plan.mesh,
        )
    differ = differing(of_rank, 5, plan, per_data_rank)
    if seed_alike and simulated_ranks() is None:
        own_group = [g for g in ranks_alike(of_rank, plan, per_data_rank) if own_coordinate(plan.mesh) in g]
        seed = next(iter(own_group[0].values()))[6]
        random.seed(seed)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(seed)
        differ = {name: ranks for name, ranks in differ.items() if name.startswith("torch")}
    return differ


_FIRST_CALLS = 3


class Draws:
    """Refuses a forward pass that draws from a generator whose states differ between ranks which must draw alike.

    `differ` are those generators, each with its ranks. Reading a state takes a tenth of a millisecond: the first calls
    of a model in training, and in inference, are looked at, and then one of 50.
    """

    def __init__(self, differ: Mapping[str, str], per_data_rank: bool, mesh: Mesh) -> None:
        self.differ, self.per_data_rank, self.comparisons = differ, per_data_rank, comparisons_on(mesh)
        self.calls = {True: 0, False: 0}
        self.before: dict[str, int] = {}

    def enter(self, module: nn.Module) -> None:
        """Note the states before a forward pass of `module`; in transforms and captures none can be read."""
        self.before = {}
        if is_transforming() or is_captured(self.comparisons.mesh):
            return
        calls = self.calls[module.training] = self.calls[module.training] + 1
        is_looked_at = calls <= _FIRST_CALLS or calls % EVERY == 0
        names = (
            GENERATORS if self.comparisons.are_due and not self.per_data_rank else self.differ if is_looked_at else ()
        )
        self.before = {name: GENERATORS[name][0]() for name in names}

    def leave(self, module: nn.Module) -> None:
        """Compare the states after it."""
        before, self.before = self.before, {}
        for name, state in before.items():
            if GENERATORS[name][0]() != state and name not in self.differ:
                text = f"the state of {name}, from which {type(module).__name__} draws"
                self.comparisons.put_down(torch.tensor([state]), name, partial(str, text))
            elif GENERATORS[name][0]() != state:
                who = "ranks of one data rank" if self.per_data_rank else "ranks that are given whole batches"
                line = GENERATORS[name][1]
                error = LayoutError(
                    f"the forward pass of {type(module).__name__} has drawn from {name}, whose state differs on "
                    f"{self.differ[name]}: {who} must draw alike, or they mix the results of different programs; "
                    f"write {line} with one seed on all, or for Python's and numpy's parallelize(..., seed_alike=True)"
                    + ("" if self.per_data_rank else "; for rows of each rank's own, inputs='per-data-rank'")
                )
                leave_word(error)  # a rank that has drawn otherwise may wait for this one
                raise error
