"""What torch.compile needs of dshard: how a tensor is taken apart, what is guarded, which frames it skips."""

from dshard.compile.graph_functions import skip_frames, traceable
from dshard.compile.metadata import CompileMetadata, compile_metadata, concrete_sizes

__all__ = ["CompileMetadata", "compile_metadata", "concrete_sizes", "skip_frames", "traceable"]
