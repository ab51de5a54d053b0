"""Types of functions and of their arguments."""

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
"""The `ctx` of a `torch.autograd.Function`, from its forward to its backward pass: attributes of any name."""
