"""Functions that view or join tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.testing import whole

Function: TypeAlias = Callable[..., Any]


def rows(*shape: int) -> Tensor:
    return torch.arange(1, prod(shape) + 1, dtype=torch.float64).sin().reshape(shape)


def assert_same(actual: Any, expected: Tensor | None) -> None:
    if expected is None:
        assert actual is None
    else:
        torch.testing.assert_close(whole(actual), expected, rtol=1e-12, atol=1e-12)
