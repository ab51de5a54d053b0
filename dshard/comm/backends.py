"""The abilities of each backend of torch.distributed, which the library reads in place of the backend's name.

| | gloo | nccl | fake | simulated |
|---|---|---|---|---|
| a wait | stops the host, and can be given up | stops the stream alone | ends at once | ends at once |
| messages between two ranks | have tags, begin one by one | have no tags, begin in groups | - | - |
| reduce_scatter into one tensor | exchanged instead | of equal pieces | exchanged instead | in one process |
| all_gather into one tensor | copies once more | in place | copies once more | in one process |
| all_gather of uneven pieces | broadcasts, all at once | messages or broadcasts | broadcasts | in one process |
| sums in half precision | rounded at every step | in single precision | - | as torch |
| products fused with a collective | - | within a host, by symmetric memory | - | - |

Other backends count as fake: they run only primitives that every backend has. On CUDA tensors the fake backend itself
has NCCL's abilities, and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from dshard.errors import DtypeError

HALF = frozenset({torch.float16, torch.bfloat16})
_SUMS = frozenset({torch.float64, torch.float32, torch.int64, torch.int32})


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """One backend of torch.distributed, by its abilities.

    Attributes:
        name: torch's name of the backend.
        sums: The dtypes whose sums, averages and products it reduces as torch does on one device.
        reduces_all: It takes every reduction, of whatever sizes: all ranks are in one process.
        scatters: Its reduce_scatter takes equal pieces of one tensor.
        gathers_in_place: Its all_gather of equal pieces writes them into one tensor.
        coalesces: Collectives of one communicator run one after the other, unless they begin as one.
        pairs_between_hosts: An all_gather or all_to_all between hosts is better sent in messages between two ranks.
        tags: Messages between two ranks have tags, so that plans in flight share a process group. Without them messages
            that wait for each other begin in groups, in the same order on all ranks.
        waits_on_host: A wait stops the host, which can look after the other ranks meanwhile.
        multiplies: Its ranks on one host read each other's memory, by which torch fuses a matmul with the all_gather of
            an operand, or the reduce_scatter of the result.
        carries_data: Something is sent.
        algorithms: The column of the table in `dshard.cost` by which its collectives are priced.
    """

    name: str
    sums: frozenset[torch.dtype] = _SUMS
    reduces_all: bool = False
    scatters: bool = False
    gathers_in_place: bool = False
    coalesces: bool = False
    pairs_between_hosts: bool = False
    tags: bool = True
    waits_on_host: bool = False
    multiplies: bool = False
    carries_data: bool = True
    algorithms: Literal["gloo", "nccl"] | None = None


GLOO = Backend("gloo", pairs_between_hosts=True, waits_on_host=True, algorithms="gloo")
NCCL = Backend(
    *("nccl", _SUMS | HALF),
    scatters=True,
    gathers_in_place=True,
    coalesces=True,
    tags=False,
    multiplies=True,
    algorithms="nccl",
)
NCCL_CONTRACT = replace(NCCL, name="nccl_contract")
"""`dshard.testing`'s process group on CPU tensors, which keeps NCCL's contract."""
FAKE = Backend("fake", carries_data=False)
FAKE_NCCL = replace(NCCL, name=FAKE.name, carries_data=False)
"""A fake process group on CUDA: a rank runs what it would run over NCCL, and nothing is sent."""
SIMULATED = Backend("simulated", reduces_all=True)
"""The backend of ranks that are simulated in one process."""
_BACKENDS = {backend.name: backend for backend in (GLOO, NCCL, NCCL_CONTRACT, FAKE)}


def backend_of(name: str, device_type: str) -> Backend:
    """The backend that a process group called `name` uses on a type of device.

    >>> backend_of("cpu:gloo,cuda:nccl", "cuda").name
    'nccl'
    """
    by_device = dict(pair.split(":", 1) for pair in name.split(",") if ":" in pair)
    name = by_device.get(device_type, name)
    if (name, device_type) == (FAKE.name, "cuda"):
        return FAKE_NCCL
    return _BACKENDS.get(name) or _BACKENDS.setdefault(name, Backend(name))


def default_backend(device_type: str) -> Backend:
    """The backend for which plans on meshes without processes are made."""
    return GLOO if device_type == "cpu" else NCCL


PLANNED = {backend.name: backend for backend in (GLOO, replace(NCCL, multiplies=False))}
"""The backends of topologies by name, on meshes of another type of device, whose ranks share no memory."""


def waits_on_host(name: str) -> bool:
    """Whether waits on some device of a process group called `name` stop the host."""
    return any(backend_of(name, device.split(":", 1)[0]).waits_on_host for device in name.split(","))


EMULATED: dict[str, str] = {}
"""Types of devices whose kernels run on tensors of another: those of CUDA under their contract, on CPU tensors."""


def kernel_device(device: torch.device) -> str:
    """The type of device by whose kernels, and with whose conventions, operators on tensors of `device` run."""
    return EMULATED.get(device.type, device.type)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms of `dtype` are summed, to be rounded once: single precision for half and less."""
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= 2 else dtype


def check_reduced(dtype: torch.dtype, what: str) -> None:
    """Refuse a reduction in a floating-point dtype that torch does not add: terms rounded to it make no sum."""
    if dtype.is_floating_point and dtype.itemsize < 2:
        raise DtypeError(
            f"{what} in {dtype}: torch has no sums in this dtype, and terms rounded to it lose small numbers; reduce "
            f"in torch.bfloat16 or torch.float32, and convert the result by .to({dtype})"
        )
