"""torch's parallel styles for the inputs and outputs of a module, not for its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dshard.core.signature import Args, Function, Kwargs
from dshard.errors import LayoutError, ShapeError
from dshard.parallel.style import AnyMesh, ParallelStyle, check_placement, distributed_input, one_axis
from dshard.placements import Placement
from dshard.validate import check_type

Layouts = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ParallelStyle):
    """A module's plain inputs become DTensors of `input_layouts`, redistributed to `desired_input_layouts`.

    One placement for each positional argument, None for an unchanged one; a single placement stands for one argument.
    `input_kwarg_layouts` and `desired_input_kwarg_layouts` do the same by name; keyword arguments not named are
    unchanged. With `use_local_output` the module gets plain local tensors.

    Raises:
        LayoutError: layouts without desired ones, or not as many.
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
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (self._prepared(args, device_mesh), self._named(kwargs, device_mesh)),
            with_kwargs=True,
        )
        return module

    def _prepared(self, args: Args, mesh: AnyMesh) -> tuple[Any, ...]:
        if self.input_layouts is None or self.desired_input_layouts is None:
            return args
        return _all(args, self.input_layouts, self.desired_input_layouts, "inputs", mesh, self.use_local_output)

    def _named(self, kwargs: Kwargs, mesh: AnyMesh) -> dict[str, Any]:
        layouts, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return {
            name: _one(value, mesh, layouts.get(name), desired.get(name), self.use_local_output)
            for name, value in kwargs.items()
        }

    def __repr__(self) -> str:
        return f"PrepareModuleInput({_listed(vars(self))})"


class PrepareModuleOutput(ParallelStyle):
    """A module's plain outputs become DTensors of `output_layouts`, redistributed to `desired_output_layouts`.

    One placement for each output, None for an unchanged one. With `use_local_output`, the default, plain local tensors
    are returned.

    Raises:
        LayoutError: not as many layouts as desired ones.
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
        module.register_forward_hook(lambda _, args, outputs: self._prepared(outputs, device_mesh))
        return module

    def _prepared(self, outputs: object, mesh: AnyMesh) -> Any:
        many = outputs if isinstance(outputs, tuple) else (outputs,)
        prepared = _all(many, self.output_layouts, self.desired_output_layouts, "outputs", mesh, self.use_local_output)
        return prepared if len(prepared) > 1 else prepared[0]

    def __repr__(self) -> str:
        return f"PrepareModuleOutput({_listed(vars(self))})"


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
    placements = tuple(layouts) if isinstance(layouts, list | tuple) else (layouts,)
    for placement in placements:
        if placement is not None:
            check_placement(name, placement)
    return placements


def _named(name: str, layouts: Mapping[str, Placement] | None) -> dict[str, Placement]:
    if layouts is None:
        return {}
    check_type(layouts, Mapping, name, "give a placement for each name, as in {'x': Shard(0)}", LayoutError)
    for key, placement in layouts.items():
        if placement is not None:
            check_placement(f"{name}[{key!r}]", placement)
    return dict(layouts)


class _PairError(LayoutError, AssertionError):
    """Layouts that are not as many as the desired ones; an AssertionError, too, as in torch."""


def _check_pair(
    name: str,
    layouts: Sequence[Placement | None] | Mapping[str, Placement],
    desired: Sequence[Placement | None] | Mapping[str, Placement] | None,
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
    make: Function = _one
    return tuple(make(*row, use_local) for row in zip(values, (mesh,) * len(values), layouts, desired, strict=True))


def _one(x: object, mesh: AnyMesh, layout: Placement | None, desired: Placement | None, use_local: bool) -> Any:
    if layout is None:
        return x
    x = distributed_input(x, mesh, (layout,), (desired or layout,))
    return x.to_local() if use_local else x


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
