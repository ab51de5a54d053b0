"""Files of safetensors: each rank reads its own regions straight into local tensors; all ranks write at once.

The format (https://huggingface.co/docs/safetensors): eight bytes of the header's length, the header as JSON with name,
dtype, shape and offsets of each tensor, then the tensors, row-major, one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from ctypes import c_ubyte
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dshard import comm
from dshard.checkpoint.store import (
    agree,
    agreed_path,
    complete_partials,
    failing,
    leaves,
    misfits,
    on_all_ranks,
    on_first_rank,
    states,
)
from dshard.comm.stored_chunks import boxes
from dshard.errors import CheckpointError
from dshard.layout import Region, Shape
from dshard.tensor import DTensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in the format."""


def load_safetensors(state: dict[str, Any], path: str | os.PathLike[str]) -> int:
    """Fill the tensors of a state, distributed or plain, from a plain state dict; return the bytes read by this rank.

    `path` is a file, or a directory of files, as models are published. A rank reads only its shard of each tensor.
    Values are cast to the dtype of the tensor that they fill. Names that the state lacks are ignored. Needs the extra
    `safetensors`.

    Raises:
        CheckpointError: a name or file is missing, a shape differs, or safetensors is not installed.
    """
    library = _library()
    tensors = {name: leaf.value for name, leaf in leaves(states(state)).items() if isinstance(leaf.value, Tensor)}
    with ExitStack() as stack, failing(f"loading from {path}"):
        files, problems = _opened(library, Path(path), stack)
        problems += [problem for name, value in tensors.items() for problem in _problem(files, name, value)]
        agree(problems, f"cannot load from {path}", None)
        return sum(_fill(files[name], name, value) for name, value in tensors.items())


def _library() -> Any:
    try:
        import safetensors  # noqa: PLC0415  # it is optional, and its absence an error of ours
    except ImportError:
        raise CheckpointError("safetensors is not installed: pip install 'dshard[safetensors]'") from None
    return safetensors


def _opened(library: Any, path: Path, stack: ExitStack) -> tuple[dict[str, Any], list[str]]:
    """The open file of each name, and messages about files that cannot be opened."""
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files: dict[str, Any] = {}
    problems = [] if paths else ["it has no file that ends in .safetensors"]
    for each in paths:
        try:
            file = stack.enter_context(library.safe_open(str(each), framework="pt", device="cpu"))
        except (OSError, library.SafetensorError) as error:
            problems.append(f"{each.name} cannot be read: {error}")
            continue
        files |= dict.fromkeys(file.keys(), file)
    return files, problems


def _problem(files: Mapping[str, Any], name: str, value: Tensor) -> Iterator[str]:
    if name not in files:
        yield f"it has no {name!r}; it has {' '.join(sorted(files)[:8]) or 'nothing'}"
        return
    yield from misfits(name, files[name].get_slice(name).get_shape(), value, "file")


def _held(value: Tensor) -> list[tuple[Region, Region]]:
    """The regions that this rank holds, each with its region of the local tensor."""
    shape = tuple(value.shape)
    return boxes(value.layout, shape) if isinstance(value, DTensor) else [(tuple(map(range, shape)),) * 2]


def _fill(file: Any, name: str, value: Tensor) -> int:
    """Fill a tensor's local values from the file; read only the regions that this rank holds."""
    nbytes, target = 0, value._local_tensor if isinstance(value, DTensor) else value.detach()
    for box, within in _held(value) if target.numel() else ():
        part = file.get_slice(name)[tuple(slice(r.start, r.stop) for r in box)] if box else file.get_tensor(name)
        nbytes += part.nbytes
        with torch.no_grad():
            target[tuple(slice(r.start, r.stop) for r in within)].copy_(part)
    return nbytes


def save_safetensors(
    state: Mapping[str, object], path: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Write the global tensors of a state as one file of safetensors, on all ranks together.

    Nothing is gathered: one of the ranks that hold a shard writes its rows at their offsets, on a file system that all
    ranks share. Values other than tensors are left out. The complete file is moved to `path`.

    Raises:
        CheckpointError: a dtype that the format does not have, or writing failed.
    """
    path, doing = agreed_path(path, "save to", process_group), f"cannot save to {path}"
    partial = path.parent / f".{path.name}.partial"
    with torch.no_grad():
        reduced = complete_partials(states(dict(state)))
    tensors = {name: leaf.value for name, leaf in leaves(reduced).items() if isinstance(leaf.value, Tensor)}
    unknown = [
        f"{name!r} is {x.dtype}, which the format does not have" for name, x in tensors.items() if x.dtype not in NAMES
    ]
    if unknown:
        raise CheckpointError(f"cannot save to {path}:\n  " + "\n  ".join(unknown))
    header, offsets, size = _header(tensors)

    def begin() -> None:
        if path.is_dir():
            raise CheckpointError("it is a directory, and this writes a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(header)
            file.truncate(size)

    def write() -> None:
        with open(partial, "r+b") as file:
            for name, value in tensors.items():
                _write(file.fileno(), offsets[name], value, process_group)
            os.fsync(file.fileno())

    with failing(f"saving to {path}: what was there before stays as it was"):
        try:
            on_first_rank(begin, doing, process_group)
            on_all_ranks(write, doing, process_group)
            on_first_rank(lambda: os.replace(partial, path), doing, process_group)
        except BaseException:
            if comm.group_rank(process_group) == 0:
                partial.unlink(missing_ok=True)
            raise


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The header, the offset of each tensor in the file, and the file's size; the widest dtypes come first."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries, at, begins = {}, 0, {}
    for name in ordered:
        x = tensors[name]
        begins[name], end = at, at + x.numel() * x.dtype.itemsize
        entries[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + begin for name, begin in begins.items()}, first + at


def _write(file: int, offset: int, value: Tensor, group: dist.ProcessGroup | None) -> None:
    """Write the local values of this rank if it is the first that holds them."""
    if not (_is_first_holder(value) if isinstance(value, DTensor) else comm.group_rank(group) == 0):
        return
    whole = (value._local_tensor if isinstance(value, DTensor) else value.detach()).cpu()
    for box, within in _held(value):
        local = whole[tuple(slice(r.start, r.stop) for r in within)].contiguous()
        data, at = memoryview((c_ubyte * local.nbytes).from_address(local.data_ptr()) if local.nbytes else b""), 0
        for begin, length in runs(tuple(value.shape), box):
            nbytes = length * value.dtype.itemsize
            _write_all(file, data[at : at + nbytes], offset + begin * value.dtype.itemsize)
            at += nbytes


def _is_first_holder(value: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same shard: index 0 on every axis that shards nothing."""
    layout = value.layout
    runtime = comm.runtime_of(layout.mesh)
    split = {axis for dim in layout.sharded_dims() for axis in layout.axes_of(dim)}
    at = None if runtime is None else runtime.coordinate
    return at is not None and all(at[axis] == 0 for axis in range(layout.mesh.ndim) if axis not in split)


def _write_all(file: int, data: Any, offset: int) -> None:
    while len(data):
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def runs(shape: Shape, box: Region) -> Iterator[tuple[int, int]]:
    """The elements of a region in the row-major global tensor: begin and length of each contiguous run.

    >>> list(runs((4, 6), (range(1, 3), range(2, 5))))
    [(8, 3), (14, 3)]
    >>> list(runs((4, 6), (range(1, 3), range(6))))
    [(6, 12)]
    """
    inner = len(shape)
    while inner and len(box[inner - 1]) == shape[inner - 1]:
        inner -= 1
    rest = prod(shape[inner:])
    if not inner:
        yield 0, rest
        return
    *outer, last = box[:inner]
    for at in product(*outer):
        row = 0
        for index, size in zip(at, shape, strict=False):
            row = row * size + index
        yield (row * shape[inner - 1] + last.start) * rest, len(last) * rest
