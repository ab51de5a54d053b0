"""torch's storage of a checkpoint in a directory, with a checksum of each tensor, published by one rename.

Data files have names that no other save uses, and `.metadata` lists the checkpoint's. So a new checkpoint is written
beside the former one, in the same directory; replacing `.metadata` publishes it, and then the former one's files are
removed. Files with other names belong to the user, and are not touched.
"""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dshard.checkpoint import metadata_file
from dshard.errors import CheckpointError

DATA_FILE = re.compile(r"__\d+_(?:([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_)?\d+\.distcp")
"""Rank, save and number: torch's names have no save."""
UNPUBLISHED = re.compile(r"\.metadata\.([0-9a-f-]{36})")
BLOCK, THREADS = 1 << 18, 2
"""Bytes that are read at once for checksums, and threads of a rank that compute them when it loads."""


class Writer(FileSystemWriter):
    """Writes a new checkpoint's files beside those of the former one, and publishes them by one rename."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.transforms: Any = _ChecksumsOfItems()
        self.has_made_directory = False

    def prepare(self) -> None:
        """Create the directory, and remove files left by a killed save; on the coordinator."""
        path = Path(self.path)
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"it is a link to {os.readlink(path)}, which does not exist")
        if path.exists() and not path.is_dir():
            raise CheckpointError("it is a file, and a checkpoint is a directory")
        self.has_made_directory = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        saved, published = dict(files_of_saves(path)), _published(path)
        has_metadata = (path / metadata_file.NAME).is_file()
        others = sorted(entry.name for entry in path.iterdir() if saved.get(entry) is None)
        if others and not (published or (has_metadata and saved)):
            shown = " ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
            raise CheckpointError(
                f"it is no checkpoint and not empty, it holds {shown}: give a new or an empty directory, or a "
                "checkpoint to replace"
            )
        if published is None and has_metadata:
            return  # Damaged metadata do not say which files are theirs.
        current = None if published is None else metadata_file.version(published)
        for file, save in saved.items():
            if save not in (None, current):
                file.unlink(missing_ok=True)

    def prepare_local_plan(self, plan: object) -> Any:
        """Check that this rank sees the directory that the first rank has created."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Name files for this save, on the coordinator."""
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{plan.storage_data.prefix}{self.save_id}_"
                ),
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the items of this rank's plan; each result has the checksum of its bytes."""
        nbytes = sum(item.tensor_storage_size() or 0 for item in plan.items)
        try:
            future = super().write_data(plan, planner)
        except Exception as error:
            # torch's writer of files turns an error of the disk into one of its own that does not say what happened.
            cause = self.transforms.failure or error
            if isinstance(cause, OSError) and cause.errno is not None:
                raise CheckpointError(
                    f"{cause.strerror}: cannot write {nbytes} bytes of tensors to {self.path}"
                ) from None
            raise
        for result in future.value():
            result.storage_data.crc32 = self.transforms.crc32[result.index]
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Publish the checkpoint, on the coordinator, after all ranks have written."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        path = Path(self.path)
        self._check_files(path, metadata.storage_data.values())
        unpublished = path / f"{metadata_file.NAME}.{self.save_id}"
        with open(unpublished, "wb") as file:
            file.write(metadata_file.as_bytes(metadata))
            file.flush()
            os.fsync(file.fileno())
        _sync(path)  # the names of the data files, before what names them
        unpublished.replace(path / metadata_file.NAME)
        with suppress(OSError):  # The checkpoint is there; files that are left are removed by the next save.
            _sync(path)
            for former, save in files_of_saves(path):
                if save != self.save_id:
                    former.unlink(missing_ok=True)

    def _check_files(self, path: Path, infos: Any) -> None:
        ends: dict[str, int] = {}
        for info in infos:
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            if not (path / name).is_file() or (path / name).stat().st_size < end:
                raise CheckpointError(
                    f"{path / name}, which a rank has written, is not there: give a path on a file system that all "
                    "ranks share, and let one job at a time save to it"
                )

    def abandon(self) -> None:
        """Remove the files of this save if it was not published, which only the coordinator knows."""
        path = Path(self.path)
        with suppress(OSError):
            if (published := _published(path)) is not None and metadata_file.version(published) == self.save_id:
                return
            for file, save in files_of_saves(path):
                if save == self.save_id:
                    file.unlink(missing_ok=True)
            if self.has_made_directory:
                path.rmdir()


class _ChecksumsOfItems:
    """Collects the checksum of each item written, in place of torch's transforms of streams."""

    def __init__(self) -> None:
        self.crc32: dict[MetadataIndex, int] = {}
        self.failure: OSError | None = None

    def transform_save_stream(self, item: Any, stream: IO[bytes]) -> tuple[Any, list[str]]:
        return _ChecksumStream(stream, item.index, self), []


class _ChecksumStream:
    """A stream that computes the checksum of the item that torch.save writes to it."""

    def __init__(self, stream: IO[bytes], index: MetadataIndex, checksums: _ChecksumsOfItems) -> None:
        self.stream, self.index, self.checksums, self.crc32 = stream, index, checksums, 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            return int(self.stream.write(data))
        except OSError as error:
            self.checksums.failure = error
            raise

    def flush(self) -> None:
        self.stream.flush()

    def close(self) -> None:
        """End the item; the file stays open."""
        self.stream.flush()
        self.checksums.crc32[self.index] = self.crc32


class Reader(FileSystemReader):
    """Reads one version of a checkpoint, even if another is saved meanwhile, and verifies checksums."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files = _OpenFiles()
        self.fs = self.files
        self.transforms: Any = _CheckedItems(self)
        self.known: Metadata | None = None
        self.crc32: dict[MetadataIndex, Future[int]] = {}

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The metadata, read on the first call and cached."""
        if self.known is None:
            self.known = metadata_file.read(Path(self.path))
        return self.known

    def prepare_local_plan(self, plan: Any) -> Any:
        """Open the files that this rank reads, so that they stay readable if a save unlinks them."""
        names = dict.fromkeys(self.storage_data[item.storage_index].relative_path for item in plan.items)
        self.files.hold([Path(self.path) / name for name in names])
        return plan

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read the items of this rank's plan, while threads compute their checksums ahead."""
        infos = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        with ThreadPoolExecutor(THREADS) as threads:
            self.crc32 = {
                index: threads.submit(self.files.crc32, Path(self.path) / info.relative_path, info.offset, info.length)
                for index, info in infos.items()
                if hasattr(info, "crc32")
            }
            try:
                return super().read_data(plan, planner)
            finally:
                threads.shutdown(cancel_futures=True)


class _OpenFiles(FileSystem):
    """Files opened ahead of reading."""

    def __init__(self) -> None:
        self.held: dict[Path, object] = {}
        self.stack = ExitStack()

    def hold(self, paths: list[Path]) -> None:
        """Open the files, up to the process's limit; others are opened when they are read."""
        for path in paths[: resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2]:
            self.held[path] = self.stack.enter_context(path.open("rb"))

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if Path(path) in self.held:
            yield self.held[Path(path)]
        else:
            with super().create_stream(path, mode) as stream:
                yield stream

    def crc32(self, path: Path, offset: int, length: int) -> int:
        """The checksum of bytes of a file, whose position does not change."""
        checksum, buffer = 0, memoryview(bytearray(min(length, BLOCK)))
        with self.create_stream(path, "rb") as file:
            while length and (count := os.preadv(file.fileno(), [buffer[:length]], offset)):
                checksum = zlib.crc32(buffer[:count], checksum)
                offset, length = offset + count, length - count
        return checksum


class _CheckedItems:
    """Checks the bytes of an item before torch reads it, in place of torch's transforms of streams."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.torch_transforms = reader, reader.transforms

    def transform_load_stream(self, item: Any, descriptors: Any, stream: IO[bytes]) -> Any:
        info, crc32 = self.reader.storage_data[item.storage_index], self.reader.crc32.get(item.storage_index)
        if crc32 is not None and crc32.result() != info.crc32:
            raise CheckpointError(
                f"{item.storage_index.fqn!r} is damaged: bytes {info.offset} to {info.offset + info.length} of "
                f"{info.relative_path} do not have the checksum that they were written with"
            )
        return self.torch_transforms.transform_load_stream(item, descriptors, stream)


def files_of_saves(path: Path) -> Iterator[tuple[Path, str | None]]:
    """The data files of saves in a directory, each with the identifier of its save; None for torch's files."""
    for entry in list(path.iterdir()):
        if match := DATA_FILE.fullmatch(entry.name) or UNPUBLISHED.fullmatch(entry.name):
            yield entry, match[1]


def _published(path: Path) -> Metadata | None:
    """The metadata of the checkpoint in a directory, or None if there is no readable one."""
    with suppress(CheckpointError, OSError):
        return metadata_file.read(path)
    return None


def _sync(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
