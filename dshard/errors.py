"""Every error that dshard raises on purpose.

    DShardError
    ├── ArgumentError   an argument of another type than it must have   (also a TypeError)
    ├── LayoutError     a placement, mesh or layout that cannot be      (also a ValueError and a RuntimeError)
    ├── ShapeError      sizes that do not fit together                  (also a ValueError and a RuntimeError)
    ├── MeshError       operands on different meshes, or no such ranks  (also a ValueError and a RuntimeError)
    ├── MixedError      a plain torch.Tensor among distributed tensors  (also a RuntimeError)
    ├── DtypeError      dtypes that differ, or that cannot be reduced   (also a RuntimeError)
    ├── NotationError   text that is no placement, layout or rule       (also a ValueError)
    ├── StrategyError   a strategy that does not exist, or not here     (also a ValueError)
    ├── TopologyError   a network or device that cannot be              (also a ValueError)
    ├── CheckpointError a checkpoint that cannot be saved or loaded     (also a RuntimeError)
    ├── ScheduleError   stages or a schedule that cannot be             (also a ValueError)
    ├── PipelineError   a rank failed within a pipeline's step          (also a RuntimeError)
    ├── PeerError       a rank that this one waits for does not come    (also a RuntimeError)
    ├── ReplayError     a replayed step that Python runs otherwise      (also a RuntimeError)
    ├── RankError       a rank of the pool failed                       (also a RuntimeError)
    └── RuleError       check_rule found an operator wrong              (also an AssertionError)

Each message says what was requested, the rule, and the way out, and is raised before anything is sent. Errors of two of
Python's classes exist because torch raises either. An error about a value of a wrong type is an `ArgumentError`, too,
for torch raises a TypeError.
"""

from __future__ import annotations


class DShardError(Exception):
    """The base of all errors raised on purpose by dshard."""


class ArgumentError(DShardError, TypeError):
    """An argument of another type than it must have, or of no known name."""


class LayoutError(DShardError, ValueError, RuntimeError):
    """A placement or layout that the tensor or the mesh cannot have."""


class ShapeError(DShardError, ValueError, RuntimeError):
    """Sizes or local shapes that do not fit together."""


class MeshError(DShardError, ValueError, RuntimeError):
    """Operands on different meshes, a mesh larger than the world, or no process group."""


class MixedError(DShardError, RuntimeError):
    """A plain `torch.Tensor` used together with distributed tensors."""


class DtypeError(DShardError, RuntimeError):
    """Operands of different dtypes, which torch would not convert by itself, or a reduction in one that has none."""


class NotationError(DShardError, ValueError):
    """Text that does not parse as a placement, a layout or a rule."""


class StrategyError(DShardError, ValueError):
    """A strategy of no known name, or one that is impossible on this mesh."""


class TopologyError(DShardError, ValueError):
    """A network or device that cannot be, a file that describes none, or one for other ranks."""


class CheckpointError(DShardError, RuntimeError):
    """A checkpoint that cannot be written or read, or does not match the request."""


class ScheduleError(DShardError, ValueError):
    """Stages that do not fit together, a schedule of no known name, one that waits forever or exceeds the memory."""


class PipelineError(DShardError, RuntimeError):
    """A stage failed, or a peer died or did not answer within the time limit, in the midst of a step."""


class PeerError(DShardError, RuntimeError):
    """A rank ended, or runs other operators, while this one waits for it in a collective."""


class ReplayError(DShardError, RuntimeError):
    """A replayed step does something else by Python, for what it reads beside its arguments has changed unseen."""


class CompileError(DShardError, RuntimeError):
    """Something that a compiled or exported graph cannot hold: exchanged shapes or values, or changing settings."""


class RankError(DShardError, RuntimeError):
    """A rank of the pool raised, exited or did not answer."""


class RuleError(DShardError, AssertionError):
    """An operator on distributed tensors that differs from the same on one device: what `check_rule` finds."""
