"""Support of torch.compile: flattened tensors, guards, and frames that are skipped.

graph_functions.py   functions that stand in the graph as one call, and frames left to Python
metadata.py          a tensor without its local tensor: what a compiled graph depends on
graph.py             calls and guards written into the graph; imported only while torch traces
"""

from dshard.compile.graph_functions import skip_frames, traceable
from dshard.compile.metadata import CompileMetadata, compile_metadata, concrete_sizes

__all__ = ["CompileMetadata", "compile_metadata", "concrete_sizes", "skip_frames", "traceable"]
