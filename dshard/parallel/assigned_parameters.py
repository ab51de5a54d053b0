"""Parameters that are assigned to modules in place of distributed ones: laid out as these, whatever assigns them.

So `load_state_dict(assign=True)` leaves each rank its shards, and who assigns a parameter from before `parallelize`
gets the distributed one.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook

from dshard.comm import runtime_of
from dshard.core.plain_tensors import compare_parameter
from dshard.core.replaced_parameters import successor
from dshard.distribute import distribute_tensor, replace_parameter
from dshard.tensor import DTensor

_ASSIGNED = "_dshard_assigned"
"""The attribute of a parameter with the memory of what was assigned in its place, and the parameter made of it."""


def _assigned(module: nn.Module, name: str, parameter: Any) -> Any:
    """The parameter that `module` gets where `parameter` is assigned to it."""
    parameter = successor(parameter)
    former: Any = module._parameters.get(name)
    if type(former) is not DTensor or type(parameter) is not nn.Parameter or parameter.shape != former.shape:
        return parameter
    if not former.is_leaf or parameter.is_meta or runtime_of(former.layout.mesh) is None:
        return parameter
    memory = StorageWeakRef(parameter.untyped_storage()), parameter.storage_offset()
    tied: Any = vars(former).get(_ASSIGNED)
    if tied is not None and tied[0] == memory:  # one tensor for two places that had one parameter
        return tied[1]
    compare_parameter(parameter, former.layout.mesh)  # each rank takes its part of its own
    out: Any = distribute_tensor(parameter, former.layout.mesh, former.placements, src_data_rank=None)
    vars(former)[_ASSIGNED] = memory, out
    out._matmul = former._matmul
    if former._gradient_leaf is not None and out._gradient_leaf is not None:
        out._gradient_leaf.reduce_dtype = former._gradient_leaf.reduce_dtype
    replace_parameter(name, parameter, out)
    return out


def lay_out_assigned() -> None:
    """Register the hook of all modules' parameters."""
    register_module_parameter_registration_hook(_assigned)
