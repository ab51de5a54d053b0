from __future__ import annotations

from typing import Any

CUSTOM: dict[Any, Any] = {}
