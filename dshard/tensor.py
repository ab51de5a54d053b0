"""DTensor: a torch tensor on a mesh, with the semantics of the global tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dshard import comm
from dshard.autograd.crossing import ToLocal, in_layout, redistribute, redistribute_in_dtypes
from dshard.autograd.leaf_gradients import keep_gradient_layout, keep_hooks
from dshard.autograd.local_tensors import AnyPlacement, Emptied, compare_gradients, from_local
from dshard.callers import asked_by
from dshard.comm import DeviceMesh, keep_moves, stored_chunks, traced
from dshard.compile.graph_functions import skip_frames, skip_frames_of_nodes, traceable
from dshard.compile.graph_runs import wrap_graph_runs
from dshard.compile.metadata import CompileMetadata, compile_metadata, concrete_sizes, with_concrete_sizes
from dshard.core.local_checks import checked, gradient_layout
from dshard.core.plain_tensors import is_part
from dshard.core.saved_files import check_part, plain_in_file, refuse_safetensors, torch_save_caller, warn_of_part
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec, spec_of
from dshard.core.torch_placements import check_blocks_of_torch
from dshard.core.torch_wrappers import UNNAMED
from dshard.core.transforms import constant, is_differentiating_forward, refuse_constants, with_tangent
from dshard.core.view_sync import copy_memory
from dshard.core.wrapper import UnlessAssigned, Wrapper, is_leaf, wrap
from dshard.dispatch import torch_calls
from dshard.dispatch.function_table import QUERIES
from dshard.dispatch.operator import dispatch
from dshard.dispatch.torch_calls import by_other_class
from dshard.errors import ArgumentError, LayoutError, MeshError, ShapeError
from dshard.layout import Layout, Shape, layout_of, replicated
from dshard.mesh import Mesh
from dshard.notebook import Drawn
from dshard.ops.foreach import support
from dshard.ops.norms import support_synchronised_batch_norms
from dshard.ops.optimiser_steps import support_local_steps, support_states
from dshard.placements import Placement
from dshard.rehearsal.session import ENTERED, HERE, OWN_CALLS
from dshard.torch_dtensor import IS_TORCHS, DTensorSpec, TorchDTensor
from dshard.torch_private import TracingContext, is_transforming, no_torch_function, outside_transforms

dispatch.__func__ = dispatch  # type: ignore[attr-defined]  # torch compares it with that of its own class


LONGEST = 100
"""The most characters of a local tensor in the repr of a distributed one."""


def as_dtensor(x: Wrapper) -> DTensor:
    """`x` as a DTensor, the only class of wrappers; for type checkers."""
    return x  # type: ignore[return-value]


class DTensor(Wrapper):
    """A global tensor of which each rank of a mesh holds a local tensor, declared by a placement for each mesh axis.

    It behaves like the global tensor: `shape`, operators, gradients and comparisons mean what they mean on one device.
    Made by `distribute_tensor`, `DTensor.from_local` or a factory such as `dshard.zeros`.
    """

    __slotnames__: ClassVar[list[str]] = ["_in_swap"]  # what torch.utils.swap_tensors swaps, beside `__dict__`
    grad: Any  # a DTensor, or None, where torch declares a Tensor

    @staticmethod
    def __new__(cls, *parts: Any, requires_grad: bool = False) -> DTensor:
        if len(parts) != 2 or not isinstance(parts[1], DTensorSpec):
            raise ArgumentError(
                "a DTensor is not made by its class: use dshard.distribute_tensor(x, mesh, placements), "
                "DTensor.from_local(local, mesh, placements), or a factory such as dshard.zeros"
            )
        local, spec = parts
        if not isinstance(spec, Spec):  # torch's own
            shape, meta = tuple(spec.shape), spec.tensor_meta
            layout = layout_of(comm.as_mesh(spec.mesh), spec.placements, len(shape))
            spec = spec_of(layout, shape, tuple(meta.stride), meta.dtype, local.device)
        out = cls._wrap(local.detach(), spec)
        return out.requires_grad_() if requires_grad else out

    @classmethod
    def _wrap(cls, local: Tensor, spec: Spec) -> DTensor:
        return as_dtensor(wrap(local, spec))

    @property
    def _in_swap(self) -> DTensor:
        """This tensor, for `torch.utils.swap_tensors` alone: copies and pickles look for slots, too."""
        if not asked_by("torch.utils"):
            raise AttributeError("_in_swap")
        return self

    @_in_swap.setter
    def _in_swap(self, other: DTensor) -> None:
        keep_hooks(self, other)

    # -- layout and mesh

    @property
    def layout(self) -> Layout:  # type: ignore[override]  # torch's own layout is `torch.strided` for every DTensor
        """Mesh, placements and order of the mesh axes."""
        # torch has the name for the format of memory: its own functions compare it with torch.sparse_csr, and pass it
        # to factories, as models of transformers do. So the answer depends on who asks; other libraries get the Layout,
        # but for safetensors, which asks before it writes, and would take that for a sparse format.
        if asked_by("torch", "transformers"):
            return torch.strided  # type: ignore[return-value]
        if asked_by("safetensors"):
            refuse_safetensors(self._spec)
        return self._spec.layout

    @property
    def placements(self) -> tuple[Placement, ...]:  # type: ignore[override]  # they have the methods of torch's
        """One placement for each mesh axis, of classes that derive from torch's, too."""
        return self._spec.placements

    @property
    def device_mesh(self) -> DeviceMesh | Mesh:  # type: ignore[override]  # torch has no pure mesh
        """torch's mesh of the tensor, or the pure mesh if there are no processes."""
        if asked_by("peft.tuners.tuners_utils"):
            return UNNAMED  # type: ignore[return-value]  # by names it tells whether layers compute with local weights
        return comm.device_mesh_of(self._spec.layout.mesh)

    # -- to and from local tensors

    @staticmethod
    @traceable
    @constant
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | Mesh | None = None,
        placements: Sequence[AnyPlacement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[AnyPlacement] | None = None,
    ) -> DTensor:
        """The DTensor made of each rank's local tensor; without placements each rank passes the global tensor.

        A local tensor of another type of device than the mesh's is copied to that.
        Nothing is sent: without `shape`, the global shape, all local tensors are assumed to have one shape, so uneven
        ones need it. Ranks compare a new local shape or dtype just before their next collective, and under
        DSHARD_DEBUG=1 at once, with replicated local tensors. `stride` is the global stride, by default contiguous or,
        without `shape`, that of local tensors like this one side by side. With `run_check` the ranks exchange their
        local shapes, which may be uneven, and broadcast replicated local tensors from the first rank. Without a mesh,
        the mesh of the `with mesh:` block around the call is used.

        `grad_placements` are the placements of the gradient of the local tensor, by default the tensor's own, with
        Replicate in place of Partial. With Partial each rank gets a term of it: its own one of a partial gradient, an
        equal share of another.

        Raises:
            LayoutError: placements that do not fit the tensor or the mesh.
            ShapeError: local shapes that do not make up one global tensor.
            MeshError: there is no process group.
        """
        if traced(local_tensor):
            local_tensor = with_concrete_sizes(local_tensor)
        return from_local(local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements)  # type: ignore[no-any-return]

    def to_local(self, *, grad_placements: Sequence[AnyPlacement] | None = None) -> Tensor:
        """The local tensor of this rank; `grad_placements` are the placements of its gradient.

        By default these are the tensor's own, with Replicate in place of Partial. So the gradient of a replicated local
        tensor must be the same on all ranks: if each rank has a term of it, as with sharded data, pass Partial. Under
        DSHARD_DEBUG=1 the ranks compare the gradients.
        """
        if is_transforming():
            with outside_transforms():
                return self.to_local(grad_placements=grad_placements)
        refuse_constants(self, "to_local", is_operator=False)
        layout = None
        if grad_placements is not None:
            layout = gradient_layout(self._spec.layout, self._spec.shape, grad_placements, "to_local")
        if is_differentiating_forward():
            own_layout = self._spec.layout
            dual: Tensor | None = with_tangent(
                self, lambda x: as_dtensor(in_layout(x, own_layout)).to_local(grad_placements=grad_placements)
            )
            if dual is not None:
                return dual
        if comm.is_absent(self._local_tensor, self._spec.layout.mesh):
            return self._emptied()
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._part(self._local_tensor.detach())
        layout = self._spec.layout.cotangent() if layout is None else layout
        local: Tensor = ToLocal.apply(self, self._spec.with_layout(layout))  # type: ignore[no-untyped-call]
        if not is_dynamo_compiling():
            comm.watch_backward(local, layout.mesh.ranks)
            if checked(self._spec.layout, self._spec.dtype)[1]:
                local.register_hook(partial(compare_gradients, layout))
        return self._part(local)

    def _part(self, local: Tensor) -> Tensor:
        """A local tensor, which is known as such if others differ: no plain tensor that is alike on all ranks."""
        if not (is_dynamo_compiling() or self._spec.layout.is_replicated()):
            is_part(local)
        return local

    def _emptied(self) -> Tensor:
        """The local tensor of a rank outside the mesh."""
        spec = self._spec
        local = ToLocal.apply(self, spec.with_layout(spec.layout.cotangent()))  # type: ignore[no-untyped-call]
        return Emptied.apply(local, spec.device)  # type: ignore[no-any-return, no-untyped-call]

    def full_tensor(self, *, grad_placements: Sequence[AnyPlacement] | None = None) -> Tensor:
        """The global tensor, as a plain tensor on every rank."""
        layout = replicated(self._spec.layout.mesh)
        if grad_placements is not None:  # before anything is sent
            gradient_layout(layout, self._spec.shape, grad_placements, "full_tensor")
        out = as_dtensor(redistribute(self, layout))
        return out.to_local(grad_placements=grad_placements)

    def to_torch(self) -> TorchDTensor:
        """This tensor as one of torch's own class, of the same memory. Differentiable.

        Raises:
            MeshError: there are no processes.
            LayoutError: uneven parts of blocks, which torch counts otherwise.
        """
        mesh = self.device_mesh
        if isinstance(mesh, Mesh):
            raise MeshError(f"to_torch on the mesh ({mesh}), which has no processes: make it by init_device_mesh")
        placements: Any = self._spec.placements
        check_blocks_of_torch(self._spec.layout, self._spec.shape)
        return TorchDTensor.from_local(self.to_local(), mesh, placements, shape=self.shape, stride=self.stride())

    def redistribute(  # it takes a pure mesh, too
        self,
        device_mesh: DeviceMesh | Mesh | None = None,
        placements: Sequence[AnyPlacement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """This tensor in other placements or on another mesh, by the cheapest sequence of collectives. Differentiable.

        With `forward_dtype` the values are sent, and returned, in that dtype; the gradient is sent in `backward_dtype`,
        by default the dtype of this tensor, to which it is cast.

        With `async_op` the first collective is in flight on return. The first use of the result waits for it,
        by any operator, `to_local`, `full_tensor` or a backward pass; until then this tensor must not be written. An
        error of the collective is raised there. The gradient is redistributed in the same way.

        To another mesh, which may share ranks with this one, every rank of either mesh calls it, and it has ended on
        return. A rank outside a mesh has an empty local tensor there: before, made by `distribute_tensor` or
        `from_local(torch.empty(0), ..., shape=...)`, and as the result; in backward it passes any gradient, as in
        `y.backward(y)`.

        Raises:
            LayoutError: placements that do not fit the tensor or the mesh.
            MeshError: a mesh of other devices, or without processes.
            DtypeError: a reduction in a dtype that has none, such as float8.
        """
        if ENTERED and HERE.answer is not None and not is_dynamo_compiling():
            dtypes: Any = {"forward_dtype": forward_dtype, "backward_dtype": backward_dtype}
            call = DTensor.redistribute, (self, device_mesh, placements), {"async_op": async_op, **dtypes}
            return HERE.answer(*call)  # type: ignore[no-any-return]
        mesh = self._spec.layout.mesh if device_mesh is None else comm.as_mesh(device_mesh)
        if placements is None:
            raise LayoutError(
                f"redistribute needs the placements to go to: {mesh.ndim} of them, one for each axis of ({mesh})"
            )
        layout = layout_of(mesh, placements, len(self._spec.shape))
        if forward_dtype is None and backward_dtype is None:
            return redistribute(self, layout, asynchronous=async_op)  # type: ignore[return-value]
        dtypes = forward_dtype or self.dtype, backward_dtype or self.dtype
        if self._spec.has_partial:
            comm.check_reduced(dtypes[0], f"redistribute(forward_dtype=...) of a tensor laid out [{self._spec.layout}]")
        if backward_dtype is not None:
            comm.check_reduced(backward_dtype, "redistribute(backward_dtype=...), which reduces gradients")
        return redistribute_in_dtypes(self, layout, async_op, *dtypes)  # type: ignore[no-any-return]

    # -- what torch asks of a tensor subclass

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if len(types) > 1 and (out := by_other_class(func, types, args, kwargs or {})) is not NotImplemented:
            return out
        if ENTERED and (answer := HERE.answer) is not None:
            return answer(func, args, kwargs or {})
        if func in QUERIES and type(args[0]) is DTensor:
            with no_torch_function():  # optimisers ask these of each parameter, and models of each tensor
                return func(*args, **(kwargs or {}))
        return torch_calls.call(func, args, kwargs or {})

    __torch_dispatch__ = staticmethod(dispatch)  # type: ignore[assignment]

    # -- what torch.compile asks of it

    def __tensor_flatten__(self) -> tuple[list[str], CompileMetadata]:
        # Dynamo wants the mesh among the parts of torch's class. In graphs it would be one more input and output of
        # each tensor, so the tensors that AOTAutograd takes apart have the local tensor alone.
        names = ["_local_tensor"]
        if TracingContext.try_get() is not None:
            wrap_graph_runs()
            if IS_TORCHS and not traced(self._local_tensor):
                names.append("device_mesh")
        with no_torch_function():
            return names, compile_metadata(self._spec, is_leaf(self), self.requires_grad)

    @UnlessAssigned
    def __tensor_unflatten__(
        parts: dict[str, Tensor], flat: CompileMetadata, size: Sequence[int], stride: Sequence[int]
    ) -> DTensor:
        local = parts["_local_tensor"]
        if type(local) is Tensor or not traced(local):
            return as_dtensor(wrap(local, flat.spec(size, stride)))
        sizes_of = [concrete_sizes(sizes) for sizes in (size, stride, local.shape)]
        out = DTensor._wrap(local, flat.spec(sizes_of[0], sizes_of[1]))
        out._leaf = flat.leaf
        if flat.leaf:
            keep_moves(local)
        return out

    def _stable_hash_for_caching(self) -> str:
        return compile_metadata(self._spec, is_leaf(self), self.requires_grad).digest()

    def __coerce_tangent_metadata__(self) -> DTensor:
        layout = self._spec.layout.cotangent()
        with no_torch_function():
            return as_dtensor(redistribute(self, layout))

    def __coerce_same_metadata_as_tangent__(
        self, flat: CompileMetadata, expected_type: object = None
    ) -> DTensor | None:
        return None if expected_type is not None else as_dtensor(redistribute(self, flat.origin.layout))

    # -- text and copies

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        grad = f", grad_fn={type(self.grad_fn).__name__}" if self.grad_fn is not None else ""
        leaf = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
        where = f"[{self._spec.layout}] on ({self._spec.layout.mesh})"
        local = f"local={self._local_tensor}"
        if len(local) > LONGEST:
            local = f"local of shape {tuple(self._local_tensor.shape)}"
        return f"DTensor({tuple(self.shape)}, {self.dtype}, {where}, {local}{grad}{leaf})"

    _repr_html_ = Drawn._repr_html_

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Record operators on this tensor; its gradient gets its own placements."""
        with no_torch_function():
            super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf:
            keep_gradient_layout(self)
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> DTensor:
        if not self.is_leaf:
            raise ShapeError("only leaf DTensors can be deep-copied, as in torch: detach it first")
        copied: Any = memo.get(id(self))
        if copied is not None:
            return copied  # type: ignore[no-any-return]
        is_parameter = isinstance(self, torch.nn.Parameter)
        with torch.no_grad():  # as torch's, the copy of a parameter shares no memory
            copy = self._wrap(self._local_tensor.clone(), self._spec) if is_parameter else copy_memory(self, memo)
        out = _restore(as_dtensor(copy), self.requires_grad, is_parameter, memo, self)
        out.__dict__.update(deepcopy(_attributes(self), memo))
        if self.grad is not None and not is_parameter:  # torch copies the gradients of parameters neither
            out.grad = deepcopy(self.grad, memo)
        return out

    # -- what torch.distributed.checkpoint asks of a tensor

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        return stored_chunks.write_items(fqn, self._local_tensor, self._spec.layout, self._spec.shape)

    def __create_chunk_list__(self) -> list[object]:
        return stored_chunks.chunks(self._spec.layout, self._spec.shape)

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return stored_chunks.part(self._local_tensor, self._spec.layout, self._spec.shape, index)

    def __reduce_ex__(self, protocol: object) -> Any:
        spec = self._spec
        local = self._local_tensor.detach()  # without the references to its views, which are of this process
        state = self.requires_grad, isinstance(self, torch.nn.Parameter), _attributes(self)
        writer, saver = None, torch_save_caller()
        if saver is not None:
            value = plain_in_file(local, spec, *state)
            if value is not None:
                return value.__reduce_ex__(protocol)
            warn_of_part(saver, local, spec)
            writer = None if comm.runtime_of(spec.layout.mesh) is None else comm.group_rank()
        device = None if local.device == spec.device else spec.device
        return _unpickle, (local, spec.layout, (spec.shape, spec.stride, spec.dtype, device), *state, writer)


OWN_CALLS[DTensor.redistribute] = DTensor.redistribute  # which asks the session itself: a warm call has a frame less
support()
support_states()
support_local_steps()
support_synchronised_batch_norms()
skip_frames(DTensor)
skip_frames_of_nodes("dshard.autograd")


def _attributes(x: DTensor) -> dict[str, Any]:
    """The attributes that the program has set on `x`: all but the attributes of this class and of `nn.Parameter`."""
    return {name: value for name, value in x.__dict__.items() if name not in _OWN and not hasattr(Wrapper, name)}


_OWN = ("_lazy_local", "_is_param")


def _restore(
    x: DTensor, requires_grad: bool, is_parameter: bool, memo: dict[int, object] | None, source: object
) -> DTensor:
    x = torch.nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)  # type: ignore[assignment]
    if memo is not None:
        memo[id(source)] = x
    return x


def _unpickle(
    local: Tensor,
    layout: Layout,
    described: tuple[Shape, tuple[int, ...], torch.dtype, torch.device | None],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any],
    writer: int | None = None,
) -> DTensor:
    """A tensor from its pickle, or of a part from that of rank `writer`, which alone can read it.

    Without a device it is on that of `local`, which `torch.load` may map to another.
    """
    shape, stride, dtype, device = described
    if writer is not None:
        check_part(writer, layout, shape, local)
    x = DTensor._wrap(local, spec_of(layout, shape, stride, dtype, local.device if device is None else device))
    x = _restore(x, requires_grad, is_parameter, None, None)
    x.__dict__.update(attributes)
    return x
