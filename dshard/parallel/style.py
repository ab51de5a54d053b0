"""torch's parallel styles: layouts of one module on a mesh of one axis, with torch's names and meanings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from dshard.comm import DeviceMesh, as_mesh
from dshard.distribute import distribute_module, distribute_tensor
from dshard.errors import LayoutError, MixedError
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.tensor import DTensor
from dshard.validate import check_type

AnyMesh = DeviceMesh | Mesh


class ParallelStyle(ABC):
    """A layout of a module. `parallelize_module` calls `_apply`; derive from this class for a style of your own.

    All ranks get the parameters of the mesh's rank number `src_data_rank`; with None each keeps its own.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        """Lay out `module` in place, and return it."""


class ColwiseParallel(ParallelStyle):
    """The outputs of an `nn.Linear`, or the columns of an `nn.Embedding`, are sharded over the mesh.

    `input_layouts`: the layout of a plain input, replicated by default. `output_layouts`: the layout of the output,
    sharded over its last dim by default. `use_local_output`: return the plain local tensor, or else the DTensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (_placement("input_layouts", input_layouts, Replicate()),)
        self.output_layouts = (_placement("output_layouts", output_layouts, Shard(-1)),)
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        layouts: Mapping[str, Placement]
        match module:
            case nn.Linear():
                layouts = {"weight": Shard(0), "bias": Shard(0)}
            case nn.Embedding():
                layouts = {"weight": Shard(1)}
            case _:
                raise _refused("ColwiseParallel", module)
        return _lay_out(self, module, device_mesh, layouts, self.desired_input_layouts)

    def __repr__(self) -> str:
        return _shown(self, "input_layouts", "output_layouts", "use_local_output")


class RowwiseParallel(ParallelStyle):
    """The inputs of an `nn.Linear`, or the rows of an `nn.Embedding`, are sharded over the mesh; the output is a sum.

    `input_layouts`: the layout of a plain input, sharded over its last dim by default. `output_layouts`: the layout of
    the output, replicated by default (one all_reduce; a Shard takes one reduce_scatter). `use_local_output`: return the
    plain local tensor, or else the DTensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (_placement("input_layouts", input_layouts, Shard(-1)),)
        self.output_layouts = (_placement("output_layouts", output_layouts, Replicate()),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        desired: tuple[Placement, ...]
        layouts: Mapping[str, Placement]
        match module:
            case nn.Linear():
                layouts, desired = {"weight": Shard(1), "bias": Replicate()}, (Shard(-1),)
            case nn.Embedding():
                layouts, desired = {"weight": Shard(0)}, (Replicate(),)
            case _:
                raise _refused("RowwiseParallel", module)
        return _lay_out(self, module, device_mesh, layouts, desired)

    def __repr__(self) -> str:
        return _shown(self, "input_layouts", "output_layouts", "use_local_output")


class SequenceParallel(ParallelStyle):
    """The parameters of a norm, a dropout or the like are replicated, and its input sharded over the sequence.

    A plain input counts as this rank's shard of the sequence, tensor dim `sequence_dim`; a DTensor is redistributed to
    that layout. Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
    section 4.2.1.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        def replicate(name: str, submodule: nn.Module, mesh: AnyMesh) -> None:
            _distribute(submodule, mesh, {}, self.src_data_rank)

        return distribute_module(
            module,
            device_mesh,
            replicate,
            lambda mod, inputs, mesh: (
                distributed_input(inputs[0], mesh, self.sequence_sharding, self.sequence_sharding),
            ),
            partial(_returned, None, self.use_local_output),
        )

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, use_local_output={self.use_local_output})"
        )


def _placement(name: str, placement: Placement | None, default: Placement) -> Placement:
    """The placement given to a style, or its default.

    Raises:
        LayoutError: no placement.
    """
    if placement is None:
        return default
    check_placement(name, placement)
    return placement


def check_placement(name: str, placement: object) -> None:
    """Refuse a value that is no placement.

    Raises:
        LayoutError: with the name of the argument.
    """
    way_out = "give one placement, Shard(dim), Replicate() or Partial(op)"
    check_type(placement, Shard | Replicate | Partial, name, way_out, LayoutError)


def distributed_input(
    x: object, mesh: AnyMesh, layouts: tuple[Placement, ...], desired: tuple[Placement, ...], size: int | None = None
) -> DTensor:
    """An input as a DTensor with placements `desired`; a plain one is this rank's local tensor under `layouts`.

    `size` is the size of the last dim, if the module knows it. Other dims count as even, as in `DTensor.from_local`.

    Raises:
        MixedError: the input is no tensor.
        LayoutError: a mesh of several axes, or a dim that the input does not have.
    """
    if not isinstance(x, Tensor):
        raise MixedError(
            f"the input of a parallelized module must be a tensor, got {type(x).__name__}: "
            "give None as its layout in PrepareModuleInput to leave it as it is"
        )
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, layouts, shape=_global_shape(x, layouts, size))
    redistributed: DTensor = x.redistribute(placements=desired)
    return redistributed


def _global_shape(x: Tensor, layouts: tuple[Placement, ...], size: int | None) -> Sequence[int] | None:
    layout = layouts[0]
    if size is not None and isinstance(layout, Shard) and layout.dim % max(x.ndim, 1) == x.ndim - 1:
        return (*x.shape[:-1], size)
    return None


def _lay_out(
    style: ColwiseParallel | RowwiseParallel,
    module: nn.Module,
    device_mesh: AnyMesh,
    layouts: Mapping[str, Placement],
    desired: tuple[Placement, ...],
) -> nn.Module:
    """Lay out the module's parameters, and register hooks that redistribute its input and output for the style."""
    one_axis(device_mesh)
    size = module.in_features if isinstance(module, nn.Linear) else None

    def partition(name: str, submodule: nn.Module, mesh: AnyMesh) -> None:
        _distribute(submodule, mesh, layouts, style.src_data_rank)

    return distribute_module(
        module,
        device_mesh,
        partition,
        lambda mod, inputs, mesh: (distributed_input(inputs[0], mesh, style.input_layouts, desired, size), *inputs[1:]),
        partial(_returned, style.output_layouts, style.use_local_output),
    )


def _distribute(module: nn.Module, mesh: AnyMesh, layouts: Mapping[str, Placement], source: int | None) -> None:
    """Lay out the module's own parameters; those not named are replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = layouts.get(name, Replicate())
        module.register_parameter(name, distribute_tensor(parameter, mesh, [placement], src_data_rank=source))  # type: ignore[arg-type]


def _returned(
    layouts: tuple[Placement, ...] | None, use_local: bool, module: nn.Module, outputs: DTensor, mesh: AnyMesh
) -> Tensor:
    if layouts is not None:
        outputs = outputs.redistribute(placements=layouts)
    return outputs.to_local() if use_local else outputs


def one_axis(mesh: AnyMesh) -> Mesh:
    """The pure mesh of `mesh`; refuses more than one axis.

    Raises:
        LayoutError: it has several.
    """
    pure = as_mesh(mesh)
    if pure.ndim != 1:
        raise LayoutError(
            f"a style lays a module out on one mesh axis, and ({pure}) has {pure.ndim}: "
            f"give one of them, such as mesh[{pure.names[-1]!r}]"
        )
    return pure


def _refused(style: str, module: nn.Module) -> NotImplementedError:
    return NotImplementedError(
        f"{style} lays out nn.Linear and nn.Embedding, not {type(module).__name__}: "
        "lay out its parameters with distribute_module, or derive a style from ParallelStyle"
    )


def _shown(style: object, *names: str) -> str:
    return f"{type(style).__name__}({', '.join(f'{name}={getattr(style, name)}' for name in names)})"
