"""The types of what is called and of what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Args: TypeAlias = tuple[Any, ...]
"""The arguments of a call by position."""
Kwargs: TypeAlias = dict[str, Any]
"""The arguments of a call by name."""
Function: TypeAlias = Callable[..., Any]
"""A function of torch, or one that is called as it is."""
Context: TypeAlias = Any
"""What autograd hands from the forward to the backward pass of a `torch.autograd.Function`: attributes of any name."""
