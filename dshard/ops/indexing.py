"""Operators that read and write elements at given indices.

A dim that is indexed stays whole. The dims of the indices may be split where elements are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.layout import Shape
from dshard.ops.call import Call, Op, aligned
from dshard.ops.rule import ANY, LINEAR, Pending, Rule, Term
from dshard.ops.spec import Spec
from dshard.ops.views import kept, moved
from dshard.ops.joins import SAME_WHEN_EQUAL
...
