"""torch's parallel styles: layouts of modules on a mesh of one axis, with torch's names and meanings."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

from dshard.comm import DeviceMesh, as_mesh, current_mesh
from dshard.core.signature import Args, Kwargs
from dshard.distribute import distribute_module, distribute_tensor
from dshard.errors import ArgumentError, LayoutError, MeshError, MixedError, ShapeError
from dshard.mesh import Mesh
from dshard.parallel.plan_values import is_like
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.tensor import DTensor
from dshard.validate import as_int, check_type

AnyMesh = DeviceMesh | Mesh
Layouts = Placement | Sequence[Placement | None] | None
Rows: TypeAlias = Mapping[type[nn.Module], tuple[Mapping[str, Placement], Placement]]
"""For classes of modules the layouts of parameters by name, replicated if not named, and that of the input."""


class ParallelStyle(ABC):
    """A layout of a module. `parallelize_module` calls `_apply`; derive from this class for a style of your own.

    All ranks get the parameters of the mesh's rank number `src_data_rank`; with None each keeps its own.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        """Lay out `module` in place, and return it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_listed(vars(self))})"


class _OfWeights(ParallelStyle):
    """A style of modules with weights: how they, the input and the output are laid out, by the class of the module."""

    _default_input: Placement
    _default_output: Placement
    _rows: ClassVar[Rows]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (_checked("input_layouts", input_layouts) or self._default_input,)
        self.output_layouts = (_checked("output_layouts", output_layouts) or self._default_output,)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        row = next((row for kind, row in self._rows.items() if isinstance(module, kind)), None)
        if row is None:
            raise NotImplementedError(
                f"{type(self).__name__} lays out nn.Linear and nn.Embedding, not {type(module).__name__}: "
                "lay out its parameters with distribute_module, or derive a style from ParallelStyle"
            )
        one_axis(device_mesh)
        layouts, desired = row
        return self._lay_out(module, device_mesh, layouts, self.input_layouts, (desired,), self.output_layouts)

    def _lay_out(
        self,
        module: nn.Module,
        mesh: AnyMesh,
        layouts: Mapping[str, Placement],
        given: tuple[Placement, ...],
        desired: tuple[Placement, ...],
        output: tuple[Placement, ...] | None,
    ) -> nn.Module:
        """Lay out parameters, replicated if not named, and the first input, plain or not, and the output at calls."""
        size = module.in_features if isinstance(module, nn.Linear) else None

        def lay_out(_: str, own: nn.Module, mesh: Any) -> None:
            for name, x in list(own.named_parameters(recurse=False)):
                laid: Any = distribute_tensor(
                    x, mesh, [layouts.get(name, Replicate())], src_data_rank=self.src_data_rank
                )
                own.register_parameter(name, laid)

        def laid_out_input(_: nn.Module, inputs: Args, mesh: Any) -> Args:
            return distributed_input(inputs[0], mesh, given, desired, size), *inputs[1:]

        def returned(_: nn.Module, x: DTensor, mesh: Any) -> Tensor:
            x = x if output is None else x.redistribute(placements=output)
            return x.to_local() if self.use_local_output else x

        return distribute_module(module, mesh, lay_out, laid_out_input, returned)


class ColwiseParallel(_OfWeights):
    """The outputs of an `nn.Linear`, or the columns of an `nn.Embedding`, are sharded over the mesh.

    `input_layouts`: the layout of a plain input, replicated by default. `output_layouts`: the layout of the output,
    sharded over its last dim by default. `use_local_output`: return the plain local tensor, or else the DTensor.
    """

    _default_input, _default_output = Replicate(), Shard(-1)
    desired_input_layouts = (Replicate(),)
    _rows: ClassVar[Rows] = {
        nn.Linear: ({"weight": Shard(0), "bias": Shard(0)}, Replicate()),
        nn.Embedding: ({"weight": Shard(1)}, Replicate()),
    }


class RowwiseParallel(_OfWeights):
    """The inputs of an `nn.Linear`, or the rows of an `nn.Embedding`, are sharded over the mesh; the output is a sum.

    `input_layouts`: the layout of a plain input, sharded over its last dim by default. `output_layouts`: the layout of
    the output, replicated by default (one all_reduce; a Shard takes one reduce_scatter). `use_local_output`: return the
    plain local tensor, or else the DTensor.
    """

    _default_input, _default_output = Shard(-1), Replicate()
    _rows: ClassVar[Rows] = {
        nn.Linear: ({"weight": Shard(1)}, Shard(-1)),
        nn.Embedding: ({"weight": Shard(0)}, Replicate()),
    }


class SequenceParallel(_OfWeights):
    """The parameters of a norm, a dropout or the like are replicated, and its input sharded over the sequence.

    A plain input counts as this rank's shard of the sequence, tensor dim `sequence_dim`; a DTensor is redistributed to
    that layout. Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
    section 4.2.1.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        return self._lay_out(module, device_mesh, {}, self.sequence_sharding, self.sequence_sharding, None)

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, use_local_output={self.use_local_output})"
        )


def _checked(name: str, placement: Any) -> Placement | None:
    """A placement, or None; any other value is refused."""
    if placement is not None:
        way_out = "give one placement, Shard(dim), Replicate() or Partial(op)"
        check_type(placement, Shard | Replicate | Partial, name, way_out, LayoutError)
    return placement  # type: ignore[no-any-return]


def distributed_input(
    x: object, mesh: AnyMesh, layouts: tuple[Placement, ...], desired: tuple[Placement, ...], size: int | None = None
) -> DTensor:
    """An input as a DTensor with placements `desired`; a plain one is this rank's local tensor under `layouts`.

    `size` is the size of the last dim, if the module knows it. Other dims count as even, as in `DTensor.from_local`.
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


def one_axis(mesh: AnyMesh) -> Mesh:
    """The pure mesh of `mesh`; refuses more than one axis."""
    pure = as_mesh(mesh)
    if pure.ndim != 1:
        raise LayoutError(
            f"a style lays a module out on one mesh axis, and ({pure}) has {pure.ndim}: "
            f"give one of them, such as mesh[{pure.names[-1]!r}]"
        )
    return pure


class PrepareModuleInput(ParallelStyle):
    """A module's plain inputs become DTensors of `input_layouts`, redistributed to `desired_input_layouts`.

    One placement for each positional argument, None for an unchanged one; a single placement stands for one argument.
    `input_kwarg_layouts` and `desired_input_kwarg_layouts` do the same by name; keyword arguments not named are
    unchanged. With `use_local_output` the module gets plain local tensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _tuple("input_layouts", input_layouts)
        self.desired_input_layouts = _tuple("desired_input_layouts", desired_input_layouts)
        self.input_kwarg_layouts = _named("input_kwarg_layouts", input_kwarg_layouts)
        self.desired_input_kwarg_layouts = _named("desired_input_kwarg_layouts", desired_input_kwarg_layouts)
        self.use_local_output = use_local_output
        if self.input_layouts is None and self.desired_input_layouts is not None:
            raise LayoutError("desired_input_layouts without input_layouts: say how the inputs lie, too")
        if self.input_layouts is not None:
            _check_pair("input_layouts", self.input_layouts, self.desired_input_layouts)
        if input_kwarg_layouts is not None:
            _check_pair("input_kwarg_layouts", self.input_kwarg_layouts, self.desired_input_kwarg_layouts)
            if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
                here, there = ", ".join(self.input_kwarg_layouts), ", ".join(self.desired_input_kwarg_layouts)
                raise LayoutError(
                    f"input_kwarg_layouts are of {here}, desired_input_kwarg_layouts of {there}: name the same in both"
                )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        one_axis(device_mesh)

        def prepared(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            given, desired, use_local = self.input_layouts, self.desired_input_layouts, self.use_local_output
            if given is not None and desired is not None:
                args = _all(args, given, desired, "inputs", device_mesh, use_local)
            layout, into = self.input_kwarg_layouts.get, self.desired_input_kwarg_layouts.get
            return args, {key: _one(x, device_mesh, layout(key), into(key), use_local) for key, x in kwargs.items()}

        module.register_forward_pre_hook(prepared, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """A module's plain outputs become DTensors of `output_layouts`, redistributed to `desired_output_layouts`.

    One placement for each output, None for an unchanged one. With `use_local_output`, the default, plain local tensors
    are returned.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _tuple("output_layouts", output_layouts) or ()
        self.desired_output_layouts = _tuple("desired_output_layouts", desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _check_pair("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        one_axis(device_mesh)

        def prepared(_: nn.Module, args: Args, outputs: object) -> Any:
            many = outputs if isinstance(outputs, tuple) else (outputs,)
            ends = self.output_layouts, self.desired_output_layouts
            out = _all(many, *ends, "outputs", device_mesh, self.use_local_output)
            return out if len(out) > 1 else out[0]

        module.register_forward_hook(prepared)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; `use_local_input` is the former's `use_local_output`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        before, after = vars(self.prepare_module_input), vars(self.prepare_module_output)
        renamed = {"use_local_input" if name == "use_local_output" else name: before[name] for name in before}
        return f"PrepareModuleInputOutput({_listed(renamed | after)})"


def _tuple(name: str, layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    return tuple([_checked(name, each) for each in (layouts if isinstance(layouts, list | tuple) else (layouts,))])


def _named(name: str, layouts: Mapping[str, Placement] | None) -> dict[str, Placement | None]:
    if layouts is None:
        return {}
    check_type(layouts, Mapping, name, "give a placement for each name, as in {'x': Shard(0)}", LayoutError)
    return {key: _checked(f"{name}[{key!r}]", placement) for key, placement in layouts.items()}


class _PairError(LayoutError, AssertionError):
    """Layouts that are not as many as the desired ones; an AssertionError, too, as in torch."""


def _check_pair(
    name: str,
    layouts: Sequence[Placement | None] | Mapping[str, Placement | None],
    desired: Sequence[Placement | None] | Mapping[str, Placement | None] | None,
) -> None:
    if desired is None or len(layouts) != len(desired):
        raise _PairError(
            f"{name} and desired_{name} should have same length! They have {len(layouts)} and "
            f"{0 if desired is None else len(desired)} layouts: give as many of the one as of the other"
        )


def _all(
    values: tuple[object, ...],
    layouts: tuple[Placement | None, ...],
    desired: tuple[Placement | None, ...],
    what: str,
    mesh: AnyMesh,
    use_local: bool,
) -> tuple[Any, ...]:
    if len(values) != len(layouts):
        raise ShapeError(
            f"module {what} and {what[:-1]}_layouts should have same length! "
            f"They are {len(values)} and {len(layouts)}: give one for each, None for what is to be left as it is"
        )
    rows = zip(values, layouts, desired, strict=True)
    return tuple(_one(x, mesh, layout, placement, use_local) for x, layout, placement in rows)


def _one(x: object, mesh: AnyMesh, layout: Placement | None, desired: Placement | None, use_local: bool) -> Any:
    if layout is None:
        return x
    x = distributed_input(x, mesh, (layout,), (desired or layout,))
    return x.to_local() if use_local else x


def _listed(values: Mapping[str, object]) -> str:
    """The arguments of a style, without the source that `parallelize_module` sets."""
    return ", ".join(f"{name}={value}" for name, value in values.items() if name != "src_data_rank")


def parallelize_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Lay out a module in place on a mesh of one axis, and return it; as torch's `parallelize_module`.

    The plan is a style for the module itself, or a style for each name of submodules: names may have wildcards in each
    of their parts ("layers.*.wq"); "" is the module itself. A name that no submodule has is a warning. Without a mesh
    that of the `with mesh:` block around the call is used. All ranks get shards of the parameters of the mesh's rank
    number `src_data_rank`; with None each rank cuts its shards out of its own, and nothing is sent.
    """
    check_type(module, nn.Module, "parallelize_module", "give an nn.Module")
    mesh = current_mesh() if device_mesh is None else device_mesh
    size = one_axis(mesh).size
    if src_data_rank is not None and as_int(src_data_rank, "src_data_rank", MeshError, least=0) >= size:
        raise MeshError(f"src_data_rank {src_data_rank}: the mesh has ranks number 0 to {size - 1}")
    if parallelize_plan is None:
        warnings.warn("No parallelize_plan is provided: parallelize_module leaves the module as it is", stacklevel=2)
        return module
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    _check(plan)
    for name, style in plan.items():
        modules = module.named_modules(remove_duplicate=False)
        submodules = dict.fromkeys([each for path, each in modules if is_like(path, name)])
        if not submodules:
            warnings.warn(
                f"parallelize_module: {name!r} names no submodule of {type(module).__name__} and does nothing",
                stacklevel=2,
            )
        style.src_data_rank = src_data_rank
        for submodule in submodules:
            style._apply(submodule, mesh)
    return module


def _check(plan: object) -> None:
    if not isinstance(plan, dict):
        raise ArgumentError(
            f"parallelize_plan is {type(plan).__name__}: give a ParallelStyle, or a dict of them by module name"
        )
    for name, style in plan.items():
        check_type(name, str, "parallelize_plan", "give names of submodules, such as 'layers.*.wq'", LayoutError)
        if not isinstance(style, ParallelStyle):
            raise LayoutError(
                f"parallelize_plan[{name!r}] is {style!r}: give a ParallelStyle, such as ColwiseParallel()"
            )
