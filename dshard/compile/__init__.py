"""Support of torch.compile: flattened tensors, guards, and frames that are skipped.

graph_functions.py   functions that stand in the graph as one call, and frames left to Python
metadata.py          a tensor without its local tensor: what a compiled graph depends on
graph.py             calls and guards written into the graph; imported only while torch traces
graph_runs.py        runs of compiled graphs, whose errors reach waiting ranks

Design: docs/design/0007-compile.md
"""

from __future__ import annotations

from collections.abc import Callable

FUNCTIONS: dict[str, Callable[..., object]] = {}
"""Functions that stand in a graph as one call, by name."""
