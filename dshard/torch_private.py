"""Every private name of torch that dshard uses, with its purpose and what fails without it.

A private name begins with an underscore, or is in a module whose name does. Torch may change one in any release, so
this module alone names them: the package imports them from here, and `import dshard` fails with a list of those that
are needed and missing. The others have a fallback, given beside them. Three kinds of names need no table:

- attributes of torch's objects, which code reads where it uses them: `_attribute` checks them here;
- operators below `torch.ops`, which torch keeps stable by their schemas;
- methods that torch calls on a tensor subclass: `PROTOCOLS`.

All were seen in torch 2.13. docs/design/0015-private-names-of-torch.md justifies what goes beyond calling a function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, _GeneratorContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

SEEN = "2.13"
"""The versions of torch that the names were seen in."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name of torch, and the use of it that fails without it."""

    path: str
    use: str
    is_needed: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.use}"


NAMES: dict[str, PrivateName] = {}
"""The private names by their path, those of modules that are imported late and attributes included."""
MISSING: list[PrivateName] = []
"""The private names that this torch lacks."""
_ABSENT = object()


def resolve(path: str) -> Any:
    """The object at a dotted path: its longest prefix that is a module is imported.

    Raises:
        AttributeError: there is none.
    """
    parts = path.split(".")
    value: object = import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        inner = getattr(value, part, _ABSENT)
        if inner is _ABSENT:
            try:
                inner = import_module(".".join(parts[:i]))
            except ImportError:
                raise AttributeError(f"torch {torch.__version__} has no {path}") from None
        value = inner
    return value


def _needed(path: str, use: str) -> Any:
    """The object at `path`, without which `use` would fail: `check` refuses a torch that lacks it."""
    return _row(PrivateName(path, use), None)


def _optional(path: str, use: str, fallback: object) -> Any:
    """The object at `path`, or `fallback`; `use` says what is lost with the fallback."""
    return _row(PrivateName(path, use, is_needed=False), fallback)


def _renamed(path: str, older: str, use: str, fallback: object) -> Any:
    """The object at `path`, which an older torch has at `older`, or `fallback`."""
    try:
        resolve(path)
    except AttributeError:
        path = older
    return _optional(path, use, fallback)


def _row(name: PrivateName, fallback: object) -> Any:
    NAMES[name.path] = name
    try:
        return resolve(name.path)
    except AttributeError:
        MISSING.append(name)
        return fallback


def _attribute(owner: str, names: str, use: str, of: object = None) -> None:
    """Attributes of a class, separated by spaces, that code reads by name; `of` is an instance that has them."""
    for attribute in names.split():
        name = NAMES[f"{owner}.{attribute}"] = PrivateName(f"{owner}.{attribute}", use)
        try:
            getattr(resolve(owner) if of is None else of, attribute)
        except AttributeError:
            MISSING.append(name)


def _late(path: str, use: str) -> None:
    """A name in a module that is imported with the feature that needs it, by `late`."""
    NAMES[path] = PrivateName(path, use)


def late(path: str) -> Any:
    """The object of a name that was declared with `_late`.

    Raises:
        ImportError: this torch lacks it.
    """
    try:
        return resolve(path)
    except AttributeError:
        raise ImportError(_message([NAMES[path]])) from None


def is_there(path: str) -> bool:
    """Whether this torch has the module of a name that was declared with `_late`, without importing it."""
    return find_spec(NAMES[path].path) is not None


def check() -> None:
    """Refuse a torch that lacks a needed name.

    Raises:
        ImportError: naming each, and what does not work without it.
    """
    missing = [name for name in MISSING if name.is_needed]
    if missing:
        raise ImportError(_message(missing))


def _message(missing: list[PrivateName]) -> str:
    lines = "".join(f"\n  {name.path}, for {name.use}" for name in missing)
    return (
        f"torch {torch.__version__} lacks private names that dshard needs:{lines}\n"
        f"dshard was tested with torch {SEEN}: install that, or a dshard for your torch"
    )


# -- operators, modes and calls of torch's functions

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    DispatchKey = _needed("torch._C.DispatchKey", "running foreach operators one by one and counting writes")
    HigherOrderOperator = _needed("torch._ops.HigherOrderOperator", "refusing operators that take functions")
    OpOverload = _needed("torch._ops.OpOverload", "telling operators from functions")
    OpOverloadPacket = _needed("torch._ops.OpOverloadPacket", "rules of all overloads of an operator")
    _FAKE = "torch._subclasses.fake_tensor"
    FakeTensor = _needed("torch._subclasses.FakeTensor", "recognising tensors that torch.compile traces with")
    FakeTensorMode = _needed(f"{_FAKE}.FakeTensorMode", "checking arguments before anything is sent")
    DataDependentOutputException = _needed(f"{_FAKE}.DataDependentOutputException", "checks of arguments")
    DynamicOutputShapeException = _needed(f"{_FAKE}.DynamicOutputShapeException", "checks of arguments")
    UnsupportedOperatorException = _needed(f"{_FAKE}.UnsupportedOperatorException", "checks of arguments")
    FunctionalTensor = _needed("torch._subclasses.functional_tensor.FunctionalTensor", "collectives in graphs")
    TorchDispatchMode = _needed("torch.utils._python_dispatch.TorchDispatchMode", "modes that see each operator")

STAND_INS = ("torch._subclasses.", "torch.distributed._local_tensor", "torch.distributed._functional_collectives")
"""Modules whose classes stand for plain tensors: of traces, of simulated ranks, of results in flight."""
no_torch_function: Callable[[], AbstractContextManager[None, None]] = _needed(
    "torch._C.DisableTorchFunctionSubclass", "calling torch's own function from the handler of a function"
)
no_functions: Callable[[], AbstractContextManager[None, None]] = _needed(
    "torch._C.DisableTorchFunction", "measuring torch's reference counts outside of all modes"
)
no_torch_dispatch: Callable[[], AbstractContextManager[None, None]] = _needed(
    "torch._C._DisableTorchDispatch", "running local operators below modes of simulated ranks and of fast calls"
)
no_dispatch: Callable[[], Any] = _needed("torch.utils._mode_utils.no_dispatch", "views outside of all modes")
disable_modes: Callable[[], _GeneratorContextManager[None]] = _needed(
    "torch.utils._python_dispatch._disable_current_modes", "the price of a step that is simulated within modes"
)
dispatch_mode: Callable[[], object] = _needed(
    "torch.utils._python_dispatch._get_current_dispatch_mode", "gathered weights in selectively checkpointed blocks"
)
without_dispatch_mode: Callable[[], _GeneratorContextManager[object]] = _needed(
    "torch.utils._python_dispatch._pop_mode_temporarily", "gathered weights in selectively checkpointed blocks"
)
n_dispatch_modes: Callable[[], int] = _needed("torch._C._len_torch_dispatch_stack", "fast calls only outside of modes")
n_function_modes: Callable[[], int] = _needed(
    "torch._C._len_torch_function_stack", "steps of optimisers on local tensors only outside of modes"
)
asks_classes: Callable[[], bool] = _needed(
    "torch._C._is_torch_function_enabled", "files that hooks of saved tensors write"
)
is_autocasting: Callable[[], bool] = _needed("torch._C._is_any_autocast_enabled", "autocast of composite operators")
decomposition_table: dict[OpOverload, Callable[..., Any]] = _needed(
    "torch._decomp.decomposition_table", "operators without a rule that torch can take apart"
)
torch_check: Callable[..., None] = _needed("torch._check", "errors of wrong arguments in torch's own words")
has_internal_overlap: Callable[[Tensor], int] = _needed(
    "torch._debug_has_internal_overlap", "refusing writes to tensors that overlap themselves"
)
is_alias_of: Callable[[Tensor, Tensor], bool] = _needed(
    "torch._C._is_alias_of", "writes to memory that another operand shares, and to recorded tensors"
)
assert_async: Callable[..., None] = _needed("torch._assert_async", "bounds of indices on accelerators")
has_compatible_shallow_copy_type: Callable[..., bool] = _needed(
    "torch._has_compatible_shallow_copy_type", "module.to(...) of distributed parameters"
)
DispatchKeySet: Any = _needed("torch._C.DispatchKeySet", "refusing distributed tensors as `data` of plain ones")
pytree: Any = _needed("torch.utils._pytree", "nested arguments of local_map, checkpoints and recordings")
_attribute(
    "torch.ops.aten.add.Tensor",
    "_schema _overloadname _can_decompose _op_dk",
    "the arguments, overloads and decompositions of operators",
)
make_wrapper_subclass: Callable[..., Any] = _needed("torch.Tensor._make_wrapper_subclass", "making distributed tensors")
"""Called with positions: keyword parsing is slower."""
make_subclass: Callable[..., Any] = _needed(
    "torch.Tensor._make_subclass", "distributed tensors that count the writes to a plain one"
)
_attribute(
    "torch.distributed.ProcessGroup", "_register_backend _set_default_backend", "the process group of NCCL's contract"
)
_attribute("torch.Tensor", "_version _base _is_view", "views, and writes to what a backward pass has saved")
_attribute("torch.Tensor", "_is_zerotensor", "gradients that torch keeps without memory")
SIZE_CACHES = frozenset(
    f"_{sizes}_capsule{end}" for sizes in ("sizes", "strides", "sym_sizes", "sym_strides") for end in ("", "_len")
)
"""Attributes in which torch's C++ caches the sizes of a subclass that answers `size()` in Python: pointers."""
_attribute("torch.Tensor", "_backward_hooks", "hooks of views that were written to")
_attribute("torch.nn.Module", "_forward_hooks", "plans of modules that others share", of=torch.nn.Module())
_attribute("torch.UntypedStorage", "_cdata", "telling whether two tensors share memory")
torch_pack: Callable[..., Any] = _needed("torch._pack_padded_sequence", "packed sequences, which nn.LSTM takes")
torch_pad: Callable[..., Any] = _needed("torch._pad_packed_sequence", "packed sequences, which nn.LSTM gives")
torch_pad_sequence: Callable[..., Any] = _needed("torch._C._nn.pad_sequence", "sequences padded to one length")
check_attention_shapes: Callable[..., bool] = _needed(
    "torch.nn.functional._mha_shape_check", "errors of wrong arguments of nn.MultiheadAttention in torch's own words"
)
_attribute("torch.nn.Module", "_parameters _buffers", "laying out the parameters of modules", torch.nn.Module())

chunk_cat: Callable[[Any, int, int], Tensor] = _needed(
    "torch._chunk_cat", "packing the tensors of a joined collective by one operator"
)

# -- autograd and transforms

graph_task_id: Callable[[], int] = _needed(
    "torch._C._current_graph_task_id", "random values of recomputed layers, and errors within backward passes"
)
current_autograd_node: Callable[[], Any] = _needed(
    "torch._C._current_autograd_node", "names of modules in traces of backward passes"
)
sequence_number: Callable[[], int] = _needed(
    "torch.autograd._get_sequence_nr", "names of modules in traces of backward passes"
)
will_execute_node: Callable[[Any], bool] = _needed(
    "torch._C._will_engine_execute_node", "leaving out matmuls of gradients that are not needed"
)
keeps_graph: Callable[[], bool] = _needed(
    "torch._C._autograd._get_current_graph_task_keep_graph", "freeing values of rehearsed modules in a backward pass"
)
autograd_engine: Any = _needed(
    "torch.autograd.Variable._execution_engine", "telling other ranks that a backward pass has failed"
)
run_backward: Callable[..., Any] = _needed(
    "torch.autograd.graph._engine_run_backward", "backward passes from a gradient that needs no check"
)
increment_version: Callable[[list[Tensor]], None] = _needed(
    "torch._C._increment_version", "refusing a backward pass whose saved local tensors were overwritten"
)
is_key_excluded: Callable[[DispatchKey], bool] = _needed(
    "torch._C._dispatch_tls_is_dispatch_key_excluded", "counting writes to local tensors below autograd"
)
exclude_key: Callable[[DispatchKey, bool], None] = _needed(
    "torch._C._dispatch_tls_set_dispatch_key_excluded", "counting writes to local tensors below autograd"
)
is_view_replay_enabled: Callable[[], bool] = _needed("torch._C._is_view_replay_enabled", "in-place operators on views")
set_view_replay_enabled: Callable[[bool], None] = _needed(
    "torch._C._set_view_replay_enabled", "in-place operators on views"
)
swap_tensors: Callable[[Tensor, Tensor], None] = _needed(
    "torch._C._swap_tensor_impl", "giving tensors that are views, or have views, other dims in place"
)
saved_tensor_hooks: Callable[[bool], Any] = _needed(
    "torch._C._autograd._top_saved_tensors_default_hooks", "hooks of saved tensors, which get distributed ones"
)
is_transforming: Callable[[], bool] = _needed("torch._C._are_functorch_transforms_active", "torch.func")
"""Whether the call is within a function that torch.func transforms."""
is_functorch_wrapped: Callable[[Tensor], bool] = _needed(
    "torch._C._functorch.is_functorch_wrapped_tensor", "torch.func"
)
is_tracking_gradients: Callable[[Tensor], bool] = _needed(
    "torch._C._functorch.is_gradtrackingtensor", "plain inputs of parallelized models within torch.func's transforms"
)
functorch_unwrapped: Callable[[Tensor], Tensor] = _needed(
    "torch._C._functorch.get_unwrapped", "torch.func through parallelized models"
)
is_in_graph: Callable[[Tensor, object], bool] = _needed(
    "torch.fx.experimental.proxy_tensor.has_proxy_slot", "refusing what the graph of make_fx would hold as a constant"
)
outside_transforms: Callable[[], AbstractContextManager[object]] = _needed(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "tensors laid out within torch.func's transforms",
)
"""A block outside the transforms of torch.func that are around it: what is computed there is constant for them."""
is_legacy_batched: Callable[[Tensor], bool] = _needed(
    "torch._C._functorch.is_legacy_batchedtensor", "refusing torch.autograd.functional with vectorize=True"
)
stash_in_tls: Callable[[str, object], None] = _needed(
    "torch._C._stash_obj_in_tls", "`with` blocks around backward passes on accelerators"
)
is_in_tls: Callable[[str], bool] = _needed(
    "torch._C._is_key_in_tls", "`with` blocks around backward passes on accelerators"
)
get_from_tls: Callable[[str], Any] = _needed(
    "torch._C._get_obj_in_tls", "`with` blocks around backward passes on accelerators"
)
_attribute("torch.autograd.graph.Node", "_sequence_nr", "names of modules in traces of backward passes")
_attribute("torch.autograd.forward_ad", "_current_level", "forward-mode derivatives")
_attribute("torch.autograd", "_make_grads", "backward passes of layers that are recomputed")

tensor_references: Callable[[Tensor], int] = _needed("torch._C.TensorBase._use_count", "reducing gradients in place")
storage_references: Callable[[int], int] = _needed("torch._C._storage_Use_Count", "reducing gradients in place")

stop_recomputation: type[Exception] | tuple[()] = _optional(
    "torch.utils.checkpoint._StopRecomputationError",
    "leaving the end of a recomputed layer out of the errors of which ranks tell each other",
    (),
)

# -- optimisers and torch.compile

_FOREACH = "optimisers on lists of tensors; without it those with foreach=None update parameter by parameter"
infinite_gradients: Callable[..., dict[torch.device, Tensor]] = _needed(
    "torch.amp.GradScaler._found_inf_per_device", "gradient scaling of the stages of a pipeline"
)
optimizer_list_types: list[type] = _optional("torch.optim.optimizer._foreach_supported_types", _FOREACH, [])
list_types: list[type] = _optional("torch.utils._foreach_utils._foreach_supported_types", _FOREACH, [])
state_like_parameter: Callable[..., Any] | None = _optional(
    "torch.optim.Optimizer._process_value_according_to_param_policy",
    "states of optimisers that are loaded as dshard's; without it they are what was given",
    None,
)
_SKIP = "leaving dshard's own methods out of torch.compile; without it each is compiled by itself after a graph break"
_EVAL_FRAME = "torch._C._dynamo.eval_frame"
FrameAction: Any = _optional(f"{_EVAL_FRAME}._FrameAction", _SKIP, None)
FrameExecStrategy: Any = _optional(f"{_EVAL_FRAME}._FrameExecStrategy", _SKIP, None)
set_code_exec_strategy: Any = _optional(f"{_EVAL_FRAME}.set_code_exec_strategy", _SKIP, None)
register_custom_class: Any = _renamed(
    "torch._library.opaque_object.register_custom_class",
    "torch._library.opaque_object.register_opaque_type",
    "reading x.placements within a compiled region",
    None,
)
TracingContext: Any = _needed("torch._guards.TracingContext", "random values in compiled graphs")

# -- processes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
    from torch.distributed._local_tensor import LocalTensor as LocalTensor
    from torch.distributed._local_tensor import LocalTensorMode as LocalTensorMode
    from torch.distributed._local_tensor import local_tensor_mode as local_tensor_mode
else:
    AllgatherOptions = _needed("torch._C._distributed_c10d.AllgatherOptions", "a time limit where ranks compare calls")
    LocalTensor = _needed("torch.distributed._local_tensor.LocalTensor", "simulated ranks")
    LocalTensorMode = _needed("torch.distributed._local_tensor.LocalTensorMode", "simulated ranks")
    local_tensor_mode = _needed("torch.distributed._local_tensor.local_tensor_mode", "simulated ranks")

_SIMULATED_SPEED = "simulated ranks, whose mode would look at each operator on the tensors of one rank, too"
current_mode: Callable[[], Any] = _needed("torch.utils._python_dispatch._get_current_dispatch_mode", _SIMULATED_SPEED)
pop_mode: Callable[[], Any] = _needed("torch.utils._python_dispatch._pop_mode", _SIMULATED_SPEED)
push_mode: Callable[[Any], None] = _needed("torch.utils._python_dispatch._push_mode", _SIMULATED_SPEED)
mesh_environment: Any = _needed("torch.distributed.device_mesh._mesh_resources", "factories within `with mesh:`")
_attribute("torch.distributed.device_mesh.DeviceMesh", "_get_root_mesh", "clipping gradients on slices of one mesh")
default_store: Callable[[], Any] = _needed(
    "torch.distributed.distributed_c10d._get_default_store", "errors of one rank that reach the others"
)
resolve_process_group: Callable[[str], Any] = _needed(
    "torch.distributed.distributed_c10d._resolve_process_group", "dshard.testing.count_traffic"
)
_attribute("torch.distributed.distributed_c10d", "_process_group_name", "process groups that are named by their ranks")
_attribute("torch.distributed.distributed_c10d", "_get_split_source", "process groups that their ranks alone make")
c10d_world: Any = _needed("torch.distributed.distributed_c10d._world", "reports of the collectives that ranks wait in")
_attribute("torch.distributed.ProcessGroup", "_allgather_base _reduce_scatter_base", "collectives")
_attribute("torch.distributed.ProcessGroup", "_start_coalescing _end_coalescing", "collectives that begin as one")
_attribute("torch.distributed.ProcessGroup", "_get_sequence_number_for_group", "reports of ranks that wait")
_POOLS = "pools of ranks whose process groups are polled by one thread"
_attribute("torch.distributed.ProcessGroupGloo", "_Options", _POOLS)
_attribute("torch.distributed.ProcessGroupGloo._Options", "_devices _timeout", _POOLS)
_attribute("torch.distributed.Work", "_get_op_type", "naming the collective in which a rank waits")
_attribute("torch.distributed._local_tensor.LocalTensor", "_local_tensors", "simulated ranks")
_IS_TORCHS = "distributed tensors that are torch's, too"
_late("torch.distributed.tensor._dtensor_spec.DTensorSpec", _IS_TORCHS)
_late("torch.distributed.tensor._dtensor_spec.ShardOrderEntry", _IS_TORCHS)
_late("torch.distributed.tensor._dtensor_spec.TensorMeta", _IS_TORCHS)
_late("torch.distributed.tensor._dtensor_spec.DTensorSpec._convert_shard_order_to_StridedShard", _IS_TORCHS)
_late("torch.distributed.tensor.placement_types._StridedShard", _IS_TORCHS)
_late("torch.distributed.tensor.DTensor._op_dispatcher", "torch's implicit_replication")
_late("torch.distributed.tensor._dispatch.OpDispatcher._allow_implicit_replication", "torch's implicit_replication")
_FSDP = "refusing data parallelism over ranks that hold parts of one parameter"
_late("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._init_sharding_spec_tp", _FSDP)
_late("torch.distributed.fsdp._init_utils._init_param_handle_from_module", _FSDP)
_late("torch.distributed.fsdp._common_utils._is_fsdp_flattened", _FSDP)
_late("torch.distributed.fsdp._common_utils._FSDPState._fsdp_extension", _FSDP)
_late("torch.distributed.checkpoint._traverse.set_element", "loading checkpoints")
_late("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", "reading the metadata of checkpoints")
_late("torch.distributed.checkpoint.filesystem._StorageInfo", "reading the metadata of checkpoints")
_late("torch.serialization._get_layout", "reading the metadata of checkpoints")
_late("torch._functorch._aot_autograd.runtime_wrappers.RuntimeWrapper", "telling other ranks that a graph has failed")
_late("torch._functorch.compile_utils.rand_ops", "keeping collectives apart that are equal on one rank")
_late("torch.distributed._symmetric_memory", "operators of matmuls fused with collectives, which run in panels without")
_late("torch._dynamo", "starting ranks, which need it at their first operator on meta tensors")
_late("torch.testing._internal.distributed.fake_pg", "dshard.launch.rehearse, whose processes send nothing")
_late("torch.distributed._local_tensor.LocalTensorMode._per_rank_rng_states", "checkpointed layers of simulated ranks")
_attribute("torch.distributed._local_tensor.LocalTensorMode", "_unpatch_random_functions", _SIMULATED_SPEED)

PROTOCOLS = {
    "__torch_function__": "functions on distributed tensors",
    "__torch_dispatch__": "operators on distributed tensors",
    "__tensor_flatten__": "torch.compile: the local tensor and the metadata",
    "__tensor_unflatten__": "torch.compile: the distributed tensor of both",
    "__coerce_tangent_metadata__": "torch.compile: the layout of a traced gradient",
    "__coerce_same_metadata_as_tangent__": "torch.compile: a gradient of another layout than the traced one",
    "_stable_hash_for_caching": "torch.compile: its cache on disk",
    "_fsdp_flattened": "refusing FullyShardedDataParallel over distributed parameters",
    "__slotnames__": "torch.utils.swap_tensors, by which modules change the dtype of parameters",
    "__fx_repr__": "torch.compile: placements in the code of a graph",
    "__create_write_items__": "torch.distributed.checkpoint",
    "__create_chunk_list__": "torch.distributed.checkpoint",
    "__get_tensor_shard__": "torch.distributed.checkpoint",
}
"""The methods that torch calls on tensor subclasses, and what does not work in a torch that calls them otherwise."""

GLOBAL_HOOKS: list[dict[int, Any]] = [
    value
    for module in ("torch.nn.modules.module", "torch.optim.optimizer")
    for name, value in vars(import_module(module)).items()
    if name.startswith("_global_") and isinstance(value, dict)
]
"""torch's tables of the hooks of all modules and optimisers."""

check()
