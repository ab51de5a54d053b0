"""The file .metadata of a checkpoint: torch's pickle, read without executing anything, and a checksum after it.

torch reads the pickle and stops at its end, so the line with the checksum is in the same file, and one rename publishes
both.
"""

from __future__ import annotations

import io
import pickle
import re
import zlib
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import Metadata

from dshard.errors import CheckpointError
from dshard.torch_private import late

NAME = ".metadata"
LINE = re.compile(rb"\ndshard crc32 ([0-9a-f]{8})\n")
LENGTH = len(b"\ndshard crc32 01234567\n")

_PRIVATE = (
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
)
_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
)
ALLOWED: dict[tuple[str, str], Any] = {
    **{(torch_metadata.__name__, name): getattr(torch_metadata, name) for name in _METADATA},
    **{(path.rpartition(".")[0], path.rpartition(".")[2]): late(path) for path in _PRIVATE},
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PurePosixPath"): PurePosixPath,
}
"""The globals that the pickle may name, besides dtypes: plain records without code in their construction."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata of a checkpoint does not need")


def as_bytes(metadata: Metadata) -> bytes:
    """The contents of the file .metadata: the pickle and its checksum."""
    pickled = pickle.dumps(metadata)
    return pickled + b"\ndshard crc32 %08x\n" % zlib.crc32(pickled)


def read(directory: Path) -> Metadata:
    """The metadata of the checkpoint in a directory; without a checksum, if torch or an earlier dshard wrote it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    data = (directory / NAME).read_bytes()
    line = LINE.fullmatch(data[-LENGTH:])
    if line is not None:
        data = data[:-LENGTH]
        if int(line[1], 16) != zlib.crc32(data):
            raise CheckpointError(
                "its file .metadata is damaged: it does not have the checksum that it was written with"
            )
    stream = io.BytesIO(data)
    try:
        metadata = _Unpickler(stream).load()
    except Exception as error:  # whatever unpickling a damaged file may raise
        raise CheckpointError(f"its file .metadata cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("its file .metadata cannot be read: it holds no metadata of a checkpoint")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).is_absolute() or ".." in Path(info.relative_path).parts:
            raise CheckpointError(f"its file .metadata names the file {info.relative_path}, outside of the checkpoint")
    has_checksums = any(hasattr(info, "crc32") for info in metadata.storage_data.values())
    if stream.read(1) or (line is None and has_checksums):
        raise CheckpointError("its file .metadata is damaged: the checksum at its end cannot be read")
    return metadata


def version(metadata: Metadata) -> str | None:
    """The version of this checkpoint: different for each save to the same directory."""
    return None if metadata.storage_meta is None else metadata.storage_meta.save_id
