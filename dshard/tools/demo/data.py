"""The handwritten digits of scikit-learn: 1,797 real images of 8x8 pixels, one fifth of them kept for the test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from dshard.errors import DShardError

SPLIT_SEED = 0
TEST_PART = 5  # one image in five, of each digit
MEAN, DEVIATION = 4.9, 6.0  # of the pixels, which are 0 to 16


class MissingExtra(DShardError, ImportError):
    """Raised if a package that only the demo needs is not installed."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images, their pixels standardised, and the digit that each shows."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Digits:
        """Return the images at `indices`, in that order."""
        return Digits(self.images[indices], self.labels[indices])


def check_installed() -> None:
    """Check that the package with the images is installed.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    if find_spec("sklearn") is None:
        raise MissingExtra('the demo trains on the digits of scikit-learn: pip install "dshard[demo]"')


def load(dtype: torch.dtype = torch.float32) -> tuple[Digits, Digits]:
    """Return the training images and test images, equal on every rank and in every run."""
    check_installed()
    raw = import_module("sklearn.datasets").load_digits()  # a second that no other command has to wait
    pixels = (torch.from_numpy(raw.images) - MEAN) / DEVIATION
    digits = Digits(pixels.to(dtype), torch.from_numpy(raw.target).long())
    train, test = _split(digits.labels)
    return digits.take(train), digits.take(test)


def batches(data: Digits, size: int, steps: int, seed: int) -> Iterator[Digits]:
    """Yield `steps` batches of `size` images; each pass visits every image once, in a new order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(data), generator=generator)])
        yield data.take(order[:size])
        order = order[size:]


def _split(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices for training and test, with the same share of each digit in both."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    train, test = [], []
    for digit in labels.unique():
        members = (labels == digit).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        n_test = len(members) // TEST_PART
        test.append(members[:n_test])
        train.append(members[n_test:])
    return torch.cat(train), torch.cat(test)
