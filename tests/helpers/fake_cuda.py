"""Fake CUDA tensors (torch's FakeTensorMode) without a GPU: shapes, devices and host behaviour, but no numbers.

A torch without CUDA knows no streams or guards of it, and its backward passes ask for both: `prepare` gives it some
that do nothing (`fake_cuda.cpp`), before torch is imported. So programs of this run in processes of their own.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so")


def torch_root() -> Path:
    """Return torch's folder without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def has_cuda() -> bool:
    """Whether torch was built with CUDA, which needs no preparation."""
    return (torch_root() / "lib" / "libtorch_cuda.so").exists()


def why_not() -> str:
    """Return the reason why fake CUDA tensors are unavailable here, or ""."""
    if not sys.platform.startswith("linux"):
        return "written for Linux"
    return "" if has_cuda() or shutil.which("g++") else "torch has no CUDA, and there is no g++ to make up for it"


def prepare() -> None:
    """Give torch a CUDA runtime that does nothing, unless it has one; call it before importing torch."""
    assert "torch" not in sys.modules, "prepare() comes before `import torch`"
    if has_cuda():
        return
    for name in _LIBRARIES:
        ctypes.CDLL(str(torch_root() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_compiled()), mode=ctypes.RTLD_GLOBAL)


def _compiled() -> Path:
    """Compile the library of `SOURCE`, once for each version of torch, and return its path."""
    key = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"dshard-fake-cuda-{os.getuid()}-{key}.so"
    if not path.exists():
        root, unfinished = torch_root(), path.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-O0", "-std=c++20", "-w"]
        subprocess.run(["g++", *flags, f"-I{root / 'include'}", str(SOURCE), "-o", str(unfinished)], check=True)
        unfinished.rename(path)
    return path
