"""Random values that do not depend on the mesh: all ranks follow one sequence, drawn for the whole tensor.

Each random operator takes the next seed of a sequence that `manual_seed` begins and that every rank steps alike; each
rank draws the whole tensor from it and keeps its part, so values are those of any other layout, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.comm import cut
from dshard.mesh import Coordinate
from dshard.ops.call import LocalOp
from dshard.ops.moving import run_on_ranks

_SEEDS = Random(0)


def manual_seed(seed: int) -> None:
    """Begin the sequence of all random values of dshard: factories, initialisers and dropout."""
    _SEEDS.seed(seed)


def next_seed() -> int:
    """The next seed of the sequence, the same on every rank."""
    return _SEEDS.getrandbits(62)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block torch's generators begin with `seed`; afterwards they are as before."""
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def is_random(func: OpOverload) -> bool:
    """Whether torch says that the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def seeded_op(func: OpOverload, device: torch.device, kwargs: dict[str, Any]) -> LocalOp:
    """`func` drawing from one seed whenever it is called: every simulated rank draws the same.

    The seed is the next of the sequence, or that of the `generator` given, which must then be alike on all ranks.
    """
    given = kwargs.get("generator")
    seed = next_seed() if given is None else int(torch.randint(2**62, (), generator=given, device=given.device))

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("generator", None)
        with seeded(seed, device):
            return func(*args, **kwargs)

    return call


def fills(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the operator overwrites its first operand with random values and reads no other tensor."""
    return (
        is_random(func)
        and func._schema.name.endswith("_")
        and not args[0]._spec.layout.partial_axes()
        and not any(isinstance(arg, Tensor) for arg in args[1:])
    )


def fill(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """normal_, uniform_, bernoulli_ and their like: draw the whole tensor, keep this rank's part."""
    x = args[0]
    spec = x._spec
    draw = seeded_op(func, spec.device, kwargs)

    def local_op(coordinate: Coordinate) -> LocalOp:
        region = spec.layout.region(spec.shape, coordinate)

        def write(local: Tensor) -> Tensor:
            whole = draw(torch.empty(spec.shape, dtype=spec.dtype, device=local.device), *args[1:], **kwargs)
            return local.copy_(cut(whole, region))

        return write

    run_on_ranks(spec.layout.mesh, local_op, (x._local,), {})
    return x
