from __future__ import annotations

from dshard.ops.call import Op

RULES: dict[str, Op] = {}
