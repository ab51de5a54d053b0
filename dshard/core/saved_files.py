"""Files of `torch.save`: a tensor that is replicated everywhere is plain there, a part says whose it is.

Everything else that pickles or copies tensors, such as queues and `all_gather_object`, gets distributed ones.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NoReturn

from torch import Tensor, nn

from dshard.callers import callers
from dshard.comm import group_rank, is_absent, is_own, runtime_of, warn_here
from dshard.core.spec import Spec
from dshard.errors import CheckpointError
from dshard.layout import Layout, Shape
from dshard.torch_private import asks_classes

_PICKLERS = frozenset({"dshard", "pickle", "dill", "cloudpickle"})
"""The packages whose code may lie between `torch.save` and the method that pickles a tensor."""
_NOT_THE_USERS = ("torch.", "dshard.")  # their files are read by functions of their own, as those of checkpoints
_WARNED: set[tuple[str, int]] = set()
"""The lines from which `torch.save` was called, and wrote parts."""


def torch_save_caller() -> FrameType | None:
    """The frame of the program that called `torch.save`, if that is who pickles; None in pickles of other kinds.

    Those are, too, what a hook of saved tensors writes: autograd is to have it back as it was.
    """
    if not asks_classes():  # `__torch_function__`, which autograd's hooks of a distributed tensor run without
        return None
    is_saving = False
    for frame in callers():
        name = frame.f_globals.get("__name__", "")
        if name == "torch.serialization":
            is_saving = True
        elif is_saving or name.partition(".")[0] not in _PICKLERS:
            return frame if is_saving and not name.startswith(_NOT_THE_USERS) else None
    return None


def plain_in_file(
    local: Tensor, spec: Spec, requires_grad: bool, is_parameter: bool, attributes: dict[str, Any]
) -> Tensor | None:
    """The plain tensor that is the value of a distributed one, in its memory; None if this rank has not all of it."""
    if not is_own(local) or not spec.layout.is_replicated() or local.device != spec.device:
        return None
    x = nn.Parameter(local, requires_grad) if is_parameter else local.requires_grad_(requires_grad)
    x.__dict__.update(attributes)
    return x


def warn_of_part(caller: FrameType, local: Tensor, spec: Spec) -> None:
    """Warn, once for each line that calls `torch.save`, that the file gets this rank's local tensors alone."""
    line = caller.f_code.co_filename, caller.f_lineno
    if line in _WARNED:
        return
    _WARNED.add(line)
    held = "nothing" if is_absent(local, spec.layout.mesh) else f"a local tensor of shape {tuple(local.shape)}"
    warn_here(
        f"torch.save writes what rank {group_rank()} holds, {held} of a tensor of shape {tuple(spec.shape)} laid out "
        f"[{spec.layout}] on ({spec.layout.mesh}). To write all of it, let all ranks call\n"
        '    import dshard.checkpoint; dshard.checkpoint.save({"model": model, "optimizer": optimizer}, path)\n'
        "or, for plain tensors, which one rank then saves,\n"
        "    state = {name: x.full_tensor() for name, x in model.state_dict().items()}"
    )


def refuse_safetensors(spec: Spec) -> NoReturn:
    """Refuse the library safetensors, which would write or read the memory of one rank."""
    raise CheckpointError(
        f"safetensors takes what one rank has in memory, and a tensor of shape {tuple(spec.shape)} is laid out "
        f"[{spec.layout}] on ({spec.layout.mesh}): dshard.checkpoint.save_safetensors(model.state_dict(), path) and "
        "load_safetensors write and read the same files, where all ranks call them; or give it plain tensors, which "
        "all ranks make: {name: x.full_tensor() for name, x in model.state_dict().items()}"
    )


def check_part(writer: int, layout: Layout, shape: Shape, local: Tensor) -> None:
    """Go on only on the rank that wrote a part to a file of `torch.save`, and on its mesh."""
    mesh = layout.mesh
    if group_rank() == writer and runtime_of(mesh) is not None:
        return
    others = len({*mesh.ranks} - {writer})
    raise CheckpointError(
        f"the file holds what rank {writer} had of a tensor of shape {tuple(shape)} laid out [{layout}] on ({mesh}): a "
        f"local tensor of shape {tuple(local.shape)}; what {others} other ranks had is missing. Rank {writer} alone "
        f"can read it, where that mesh has been made; save with dshard.checkpoint.save, on all ranks, what others load"
    )
