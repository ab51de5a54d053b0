"""`distribute_tensor` and `distribute_module`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook

from dshard import comm
from dshard.autograd.crossing import redistribute
from dshard.autograd.local_tensors import AnyPlacement
from dshard.comm import DeviceMesh, as_mesh, runtime_of, traced
from dshard.compile.graph_functions import traceable
from dshard.compile.metadata import with_concrete_sizes
from dshard.core.local_checks import check_strided, checked, scattered
from dshard.core.plain_tensors import compare_parameter
from dshard.core.replaced_parameters import succeed, successor
from dshard.core.signature import Function
from dshard.core.spec import Spec, contiguous_stride, spec_of
from dshard.core.subclasses import as_plain
from dshard.core.torch_tensors import from_torch
from dshard.core.transforms import is_differentiating_forward, refuse_followed
from dshard.core.wrapper import wrap
from dshard.errors import LayoutError
from dshard.layout import Layout, Region, layout_of, replicated
from dshard.mesh import Mesh
from dshard.placements import Replicate
from dshard.tensor import DTensor, as_dtensor
from dshard.torch_dtensor import TorchDTensor
from dshard.torch_private import is_transforming, n_dispatch_modes, no_torch_function, outside_transforms
from dshard.validate import check_callable, check_type


@traceable
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | Mesh | None = None,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """The global `tensor`, which every rank passes, as a DTensor; a leaf, with the `requires_grad` of `tensor`.

    The mesh's rank number `src_data_rank` sends each rank its local tensor. With None each rank cuts it out of its own
    copy, in the same memory order, and nothing is sent. On an axis with a Partial placement the tensor is the term of
    the first rank. The result is on the mesh's type of device. On a `Mesh` without processes it has no data, with a
    warning if `tensor` has some. Without a mesh, the mesh of the `with mesh:` block around the call is used.

    Raises:
        LayoutError: a dim out of range, or not one placement for each mesh axis; blocks that do not divide a dim; a
            tensor that autograd has recorded.
        MeshError: no process group, or a mesh larger than the world.
    """
    if is_transforming():
        with outside_transforms():
            return distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    mesh = comm.as_mesh(device_mesh)
    if isinstance(tensor, TorchDTensor) and not isinstance(tensor, DTensor):
        tensor = from_torch(tensor)
    check_strided(tensor, "distribute_tensor", "the whole tensor")
    layout = replicated(mesh) if placements is None else layout_of(mesh, placements, tensor.ndim)
    if isinstance(tensor, DTensor) and tensor.layout == layout:
        return tensor
    _check_distributed(tensor, layout)
    if comm.comparing():
        call = f"distribute_tensor of {tuple(tensor.shape)}, {tensor.dtype}, [{layout}], src_data_rank={src_data_rank}"
        call += ", requires_grad" * tensor.requires_grad
        comm.compare_calls(call, mesh, contents=tensor if src_data_rank is None else None)
    term_layout, source = checked(layout, tensor.dtype)[0], as_plain(tensor).detach()
    if traced(source):
        source = with_concrete_sizes(source)
    local, shape = scattered(source, term_layout, src_data_rank), tuple(source.shape)
    device = tensor.device if comm.is_absent(local, mesh) else local.device
    if device.type == "meta" and tensor.device.type != "meta" and tensor.numel():
        comm.warn_here(
            f"distribute_tensor on the mesh ({mesh}), which has no processes: the result is only planned with, and has "
            "no data; give a tensor on device='meta' if that is meant, else a DeviceMesh from init_device_mesh"
        )
    spec = spec_of(term_layout, shape, _stride(source, src_data_rank), tensor.dtype, device)
    own = wrap(local, spec)
    out = as_dtensor(own if layout is term_layout else redistribute(own, layout))
    if isinstance(tensor, torch.nn.Parameter):
        with no_torch_function():
            return torch.nn.Parameter(out, tensor.requires_grad)  # type: ignore[return-value]
    return out.requires_grad_(tensor.requires_grad) if tensor.requires_grad else out


def _check_distributed(tensor: Tensor, layout: Layout) -> None:
    if isinstance(tensor, DTensor):
        raise LayoutError(
            f"distribute_tensor was given a DTensor laid out [{tensor.layout}]: "
            f"use redistribute to lay it out [{layout}]"
        )
    if layout.blocks:
        layout.check(tuple(tensor.shape))
    refuse_followed(tensor, "distribute_tensor")
    if not tensor.is_leaf:
        raise LayoutError(
            f"distribute_tensor of a tensor that autograd has recorded, by {type(tensor.grad_fn).__name__}: the result "
            "is a leaf, and no gradient would reach the tensor; give a leaf such as x.detach(), or use "
            "DTensor.from_local, which is differentiable"
        )


def cut(tensor: Tensor, layout: Layout) -> DTensor:
    """`distribute_tensor` with this layout, where each rank cuts its local tensor out of its own copy of `tensor`.

    For plain tensors of one shape, which a training loop gives in each step, region and spec are found once. In debug
    mode only the first of these is compared.
    """
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    is_changed = n_dispatch_modes() or is_transforming() or is_differentiating_forward()
    runtime = comm.runtime_of(layout.mesh) if is_plain and not is_changed else None
    if runtime is None or runtime.coordinate is None:
        return distribute_tensor(tensor, layout.mesh, layout.placements, src_data_rank=None)
    key = (cut, layout, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    known: tuple[Region, Spec] | None = runtime.runners.get(key)
    if known is None:
        out = distribute_tensor(tensor, layout.mesh, layout.placements, src_data_rank=None)
        if not out._spec.has_partial and not layout.blocks:
            runtime.runners.add(key, (layout.region(tensor.shape, runtime.coordinate), out._spec))
        return out
    runtime.runners.hits += 1
    region, spec = known
    local = comm.on_device_of(layout.mesh, comm.local_shard(tensor, region, torch.preserve_format))
    return as_dtensor(wrap(local, spec))


def replace_parameter(name: str, old: torch.nn.Parameter, new: DTensor) -> None:
    """Let `new` take the place of the plain parameter `old`, with its gradient, laid out as `new` is."""
    grad: Any = None
    if old.grad is not None and not comm.has_only_shape(old):
        grad = old.grad.detach().to_dense()
        grad = distribute_tensor(grad, new.layout.mesh, new.placements, src_data_rank=None)
    succeed(name, old, new, grad)


def _stride(source: Tensor, src_data_rank: int | None) -> tuple[int, ...]:
    """The strides of the distributed tensor: in the memory order of `source` where each rank cuts its own copy."""
    if src_data_rank is not None or source.is_contiguous():
        return contiguous_stride(tuple(source.shape))
    return torch.empty_like(torch.empty_strided(source.shape, source.stride(), device="meta")).stride()


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | Mesh | None = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors in place, and return the module.

    `partition_fn(name, submodule, device_mesh)` may assign `nn.Parameter`s made with `distribute_tensor`; the remaining
    plain parameters and buffers are replicated. `input_fn(module, inputs, device_mesh)` and `output_fn(module, outputs,
    device_mesh)` become hooks of the module. Without a mesh, the mesh of the `with mesh:` block around the call is
    used.

    Raises:
        MeshError: no process group, or a mesh larger than the world.
        ArgumentError: no module, or a function that cannot be called.
        LayoutError: a module that has been distributed, or a hook of other than three arguments.
    """
    check_type(module, nn.Module, "distribute_module", "give an nn.Module; a tensor is for distribute_tensor")
    device_mesh = comm.current_mesh() if device_mesh is None else device_mesh
    as_mesh(device_mesh)
    if getattr(module, _DISTRIBUTED, False):
        raise LayoutError(
            f"distribute_module of a {type(module).__name__} that it was called for before: its hooks would run twice; "
            "call it once, with all functions"
        )
    for what, function in ("partition_fn", partition_fn), ("input_fn", input_fn), ("output_fn", output_fn):
        if function is not None:
            check_callable(function, what, "give a function, or leave it out")
    input_fn, output_fn = _hook("input_fn", input_fn), _hook("output_fn", output_fn)
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, device_mesh)
        _replicate_rest(submodule, device_mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, device_mesh))
    setattr(module, _DISTRIBUTED, True)
    return module


_DISTRIBUTED = "_distribute_module_applied"
"""The attribute, the same as torch's, that marks a module as distributed by `distribute_module`."""


def _hook(what: str, function: Function | None) -> Function | None:
    """`function` of a module, values and the mesh; a function of values and the mesh is adapted, with a warning."""
    try:
        taken = 3 if function is None else len(signature(function).parameters)
    except (TypeError, ValueError):  # of what is not written in Python
        return function
    if taken == 2:
        warn(
            f"{what} of two arguments, the values and the mesh, is deprecated: give one of (module, values, mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return lambda module, values, mesh: function(values, mesh)  # type: ignore[misc]
    if taken != 3:
        raise LayoutError(f"{what} should take in 3 arguments, (module, values, mesh), and takes {taken}")
    return function


def _replicate_rest(module: nn.Module, device_mesh: DeviceMesh | Mesh) -> None:
    placements = [Replicate()] * as_mesh(device_mesh).ndim
    for name, parameter in module.named_parameters(recurse=False):
        if not isinstance(parameter, DTensor):
            module.register_parameter(name, distribute_tensor(parameter, device_mesh, placements))  # type: ignore[arg-type]
    for name, buffer in module.named_buffers(recurse=False):
        if not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, device_mesh, placements)


_ASSIGNED = "_dshard_assigned"
"""The attribute of a parameter with the memory of what was assigned in its place, and the parameter made of it."""


def _assigned(module: nn.Module, name: str, parameter: Any) -> Any:
    """The parameter that `module` gets where `parameter` is assigned to it."""
    parameter = successor(parameter)
    former: Any = module._parameters.get(name)
    if type(former) is not DTensor or type(parameter) is not nn.Parameter or parameter.shape != former.shape:
        return parameter
    if not former.is_leaf or comm.has_only_shape(parameter) or runtime_of(former.layout.mesh) is None:
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
    """Register the hook by which a parameter that is assigned in place of a distributed one is laid out as that.

    So `load_state_dict(assign=True)` leaves each rank its shards, and who assigns a parameter from before `parallelize`
    gets the distributed one.
    """
    register_module_parameter_registration_hook(_assigned)
