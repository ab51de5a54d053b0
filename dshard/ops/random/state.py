"""The sequence of draws: a seed and the number of the next draw, advanced alike on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dshard.comm import neutral_state, plain
from dshard.torch_private import SEEN, disable_modes, graph_task_id, n_dispatch_modes
from dshard.validate import as_int, check_type

MASK = (1 << 64) - 1
_MAX_SEEDS = 1 << 16
_NUMBER_BITS = 40
_SPREAD = 0xD1342543DE82EF95  # odd, so that multiples of it are as many as there are words of 64 bits
_GATHER = pow(_SPREAD, -1, 1 << 64)


@dataclass(frozen=True, slots=True)
class Draw:
    """The random bits of one tensor: a seed of 64 bits and the number of the draw."""

    seed: int
    number: int

    @property
    def next(self) -> Draw:
        """The draw after this one."""
        return Draw(self.seed, self.number + 1)


class _Sequence:
    """The sequence of draws, with marks that let a recomputed forward pass repeat its draws.

    Recomputing checkpoints save and restore the state of torch's CPU generator. One word of that state, the seed that
    the generator was begun with, has no influence on its numbers; each draw leaves a mark there that says where the
    sequence stands. A backward pass that finds a mark goes on from it, without moving the sequence itself. Where the
    user has seeded torch and the mark is gone, the next draw records which draw followed that seed.
    """

    def __init__(self) -> None:
        self.next = Draw(0, 0)
        self.ends: OrderedDict[int, Draw] = OrderedDict()
        self.indices: dict[int, int] = {}
        self.unmarked: OrderedDict[int, Draw] = OrderedDict()
        self.count = 0
        self._remember(self.next)

    def begin(self, draw: Draw) -> None:
        """Continue the sequence with `draw`."""
        self.next = draw
        self._remember(draw)
        _write(self._mark(draw))

    def take(self) -> Draw:
        """Take the next draw."""
        word = torch.default_generator.initial_seed()
        marked = self._marked(word)
        replays = graph_task_id() != -1
        draw = self.next
        if replays:
            draw = marked or self.unmarked.get(word) or draw
        elif marked is None:
            self._keep(word, draw)
        self._remember(draw.next)
        if draw == self.next:
            self.next = draw.next
        _write(self._mark(draw.next))
        return draw

    def _keep(self, word: int, draw: Draw) -> None:
        self.unmarked[word] = draw
        self.unmarked.move_to_end(word)
        if len(self.unmarked) > _MAX_SEEDS:
            self.unmarked.popitem(last=False)

    def _remember(self, draw: Draw) -> None:
        """Record that the sequence of this seed has reached `draw`."""
        index = self.indices.get(draw.seed)
        if index is None:
            index = self.indices[draw.seed] = self.count % (1 << 64 - _NUMBER_BITS)
            self.count += 1
            if len(self.indices) > _MAX_SEEDS:
                _, oldest = self.ends.popitem(last=False)
                del self.indices[oldest.seed]
        known = self.ends.get(index)
        if known is None or known.number < draw.number:
            self.ends[index] = draw
        self.ends.move_to_end(index)

    def _mark(self, draw: Draw) -> int:
        index = self.indices[draw.seed]
        return ((index << _NUMBER_BITS) + draw.number + 1) * _SPREAD & MASK

    def _marked(self, word: int) -> Draw | None:
        """The draw that a mark encodes, or None for a word that is no mark."""
        index, number = divmod((word * _GATHER & MASK) - 1, 1 << _NUMBER_BITS)
        end = self.ends.get(index)
        return Draw(end.seed, number) if end is not None and number <= end.number else None


def _write(word: int) -> None:
    """Write the word where torch keeps its CPU generator's initial seed; the generator's numbers do not change."""
    with _without_modes():
        _write_to(torch.default_generator, word)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Within the block tensors have numbers, also in FakeTensorMode, and are of one rank where ranks are simulated."""
    with plain(), disable_modes() if n_dispatch_modes() else nullcontext():
        yield


def _write_to(generator: torch.Generator, word: int) -> None:
    state = generator.get_state()
    state.view(torch.int64)[0] = _signed(word)
    generator.set_state(state)


def _check_state() -> None:
    """Refuse a torch in which a mark would change the numbers of a generator, or would be lost."""
    with plain(), neutral_state():
        marked, unmarked = torch.Generator("cpu"), torch.Generator("cpu")
        for generator in (marked, unmarked):
            generator.manual_seed(1)
        _write_to(marked, MASK - 1)
        numbers = [torch.randint(2**62, (3,), generator=g, device="cpu").tolist() for g in (marked, unmarked)]
    if marked.initial_seed() & MASK != MASK - 1 or numbers[0] != numbers[1]:
        raise ImportError(
            f"torch {torch.__version__} keeps the state of its CPU generator otherwise than dshard knows: recomputed "
            f"layers would draw other values; install torch {SEEN}, or a dshard for your torch"
        )


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_check_state()
_SEQUENCE = _Sequence()


def manual_seed(seed: int, device_mesh: object = None) -> None:
    """Seed all random values of dshard: factories, initialisers, dropout. Call it with one seed on every rank.

    The sequence is the same for all meshes; `device_mesh` is taken because torch's function of that name wants one.

    Seeds that are equal modulo 2^64 are the same. torch's own generators are not seeded by it, nor does seeding them
    move this sequence.

    Raises:
        ArgumentError: no whole number.
    """
    _SEQUENCE.begin(Draw(as_int(seed, "manual_seed") & MASK, 0))


def get_rng_state() -> Tensor:
    """The state of the sequence: the seed and the number of the next draw, two int64 on the CPU."""
    draw = _SEQUENCE.next
    with _without_modes():
        return torch.tensor([_signed(draw.seed), draw.number], dtype=torch.int64, device="cpu")


def set_rng_state(state: Tensor) -> None:
    """Restore the state that `get_rng_state` returned. Call it with one state on every rank.

    Raises:
        ValueError: not what `get_rng_state` gives.
        ArgumentError: no tensor.
    """
    check_type(state, Tensor, "a state of dshard's random values", "pass what dshard.get_rng_state() returned")
    with _without_modes():
        numbers = state.tolist() if state.dtype == torch.int64 and tuple(state.shape) == (2,) else []
    if len(numbers) != 2 or not 0 <= numbers[1] < 1 << _NUMBER_BITS:
        raise ValueError(
            f"a state of dshard's random values is two int64, seed and number of the next draw, "
            f"not a tensor of shape {tuple(state.shape)}, {state.dtype}: pass what dshard.get_rng_state() returned"
        )
    _SEQUENCE.begin(Draw(numbers[0] & MASK, numbers[1]))


def next_draw(generator: torch.Generator | None = None) -> Draw:
    """Take the next draw of the sequence; with a torch generator, a draw seeded by it, outside of the sequence."""
    if generator is None:
        return _SEQUENCE.take()
    with plain():
        return Draw(int(torch.randint(2**62, (), generator=generator, device=generator.device)), 0)
