"""`from_pretrained` onto a mesh: each rank reads only its shards of each file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dshard.comm import DeviceMesh, as_mesh
from dshard.core.plain_tensors import implicit_replication
from dshard.core.torch_placements import torch_placements
from dshard.core.torch_tensors import from_torch, is_torchs
from dshard.core.wrapper import Wrapper
from dshard.distribute import distribute_tensor
from dshard.errors import ArgumentError, MeshError
from dshard.layout import Shape, layout_of
from dshard.mesh import Mesh
from dshard.parallel.distributed_parameters import replace_parameters
from dshard.parallel.expert_modules import newly_derived
from dshard.parallel.integrations.huggingface import ParallelizedModel
from dshard.parallel.model_plan import PlanArgument, chosen_plan, parallelize
from dshard.parallel.plan_values import ModelPlan, plan_options
from dshard.placements import Placement, Replicate, Shard
from dshard.validate import shown

Placements = tuple[Placement, ...]
_STACKED, _JOINED = ("MergeModulelist",), ("MergeModulelist", "Concatenate")  # the names of operations


# -- parameters that the files of a pretrained model store in another form, which transformers converts
#
# Each rank reads shards by the placements of the parameter, and converts those. This is right for stacking the experts
# of a layer. The gate and up projections of experts are stored separately and joined along the dim of features: if that
# is sharded, a rank gets a shard of each, which is the dim in blocks; it is redistributed if the plan has others. Other
# conversions, such as splitting a fused projection, need the global tensor on each rank until it is converted.


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The operations that convert stored tensors to the parameters of some names; `parts` tensors join along `dim`."""

    names: tuple[str, ...]
    operations: tuple[str, ...]
    parts: int
    dim: int | None

    def while_loading(self, shape: Shape, placements: Placements, mesh: Mesh) -> Placements:
        """The placements in which a rank reads the stored tensors of a parameter of this shape."""
        if self.operations == _STACKED:
            return placements
        if self.dim is None:
            return (Replicate(),) * len(placements)
        splits = [isinstance(placement, Shard) and placement.dim == self.dim for placement in placements]
        ranks = prod(size for size, split in zip(mesh.shape, splits, strict=True) if split)
        stored = Shard(self.dim) if shape[self.dim] % (self.parts * ranks) == 0 else Replicate()
        return tuple(stored if split else each for each, split in zip(placements, splits, strict=True))


def known_forms(model: nn.Module) -> list[StoredForm]:
    """The forms that transformers can convert for this model, whether its files have them or not."""
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return [_form_of(converter) for converter in mapping if hasattr(converter, "operations")]


def converted_forms(model: nn.Module) -> list[StoredForm]:
    """The forms that transformers has converted for this loaded model."""
    converters: Any = getattr(model, "_weight_conversions", None) or ()
    return [_form_of(converter) for converter in converters if hasattr(converter, "operations")]


def _form_of(converter: Any) -> StoredForm:
    operations = [op for op in converter.operations if type(op).__name__ != "Force16BytesAlignment"]
    names = tuple(type(op).__name__ for op in operations)
    joins = names == _JOINED and len(converter.target_patterns) == 1
    dim = operations[-1].dim if joins else None
    return StoredForm(tuple(converter.target_patterns), names, len(converter.source_patterns), dim)


def form_of(name: str, forms: Sequence[StoredForm]) -> StoredForm | None:
    """The form of the parameter of this name; among several, the form with the most operations."""
    matching = [form for form in forms if any(target in name for target in form.names)]
    return max(matching, key=lambda form: len(form.operations), default=None)


def as_planned(p: Any, form: StoredForm | None, placements: Placements) -> Any:
    """A loaded parameter without its graph, moved to the placements of the plan; `form` was converted for it.

    Of stored tensors that were joined along a sharded dim a rank has its shard of each: they are blocks.
    """
    loaded = p.detach()
    if form is not None and form.dim is not None and Shard(form.dim) in loaded.placements:
        packed = [Shard(form.dim, blocks=form.parts) if p == Shard(form.dim) else p for p in loaded.placements]
        loaded = type(loaded).from_local(loaded.to_local(), loaded.device_mesh, packed, shape=loaded.shape)
    return loaded.redistribute(placements=placements)


def from_pretrained(
    model_class: Any,
    name: str | os.PathLike[str],
    mesh: DeviceMesh,
    plan: PlanArgument = "auto",
    *,
    example: Mapping[str, Any] | None = None,
    inputs: Any = "global",
    outputs: Any = None,
    **options: Any,
) -> Any:
    """Load transformers' `model_class.from_pretrained(name, **options)`, parallelized on `mesh`.

    The model is made without data; then each rank reads its shard of each parameter from the files. The class may be
    one of `AutoModelFor...`. `plan`, `inputs` and `outputs` are those of `parallelize`; `example` is a batch by which
    the model is traced, by default its `dummy_inputs`. All ranks call it.

    Raises:
        ArgumentError: no class of models of transformers.
        MeshError: a mesh without processes, or of several axes without names.
        StrategyError, LayoutError: as `parallelize`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"from_pretrained on the mesh ({mesh}), which has no processes to read files: make it by init_device_mesh"
        )
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise MeshError(
            f"from_pretrained on a mesh of {mesh.ndim} axes without names, by which transformers cuts what it reads: "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        )
    library = import_module("transformers")
    original_class, loads = _class_of(model_class, name, library, options), list[_Load]()

    class Loading(ParallelizedModel):
        """The class while it is loaded, in which transformers asks how the model is laid out."""

        @classmethod
        def prepare_distribute_model(cls, config: object, device_map: object = None) -> Any:
            return config, _device(mesh), None

        @classmethod
        def maybe_distribute_model(cls, model: Any, *args: Any) -> Any:
            loads.append(_lay_out(model, mesh, plan, dict(example or {})))
            return model

        def initialize_weights(self, *args: object, **kwargs: object) -> None:
            _adopt_tensors(self)
            with implicit_replication():
                super().initialize_weights(*args, **kwargs)

    config = library.distributed.DistributedConfig(tp_size=as_mesh(mesh).size)
    loading: Any = newly_derived(Loading, original_class)
    model = loading.from_pretrained(name, distributed_config=config, **options)
    model.__class__ = original_class
    _adopt_tensors(model)
    _move_as_planned(model, loads[0])
    return parallelize(model, mesh, loads[0].plan, inputs=inputs, outputs=outputs)


@dataclass(frozen=True, slots=True)
class _Load:
    """The plan of a model, and the forms in which its files may store parameters."""

    plan: ModelPlan
    forms: Sequence[StoredForm]

    def placements_of(self, name: str) -> tuple[Placement, ...]:
        """The placements of a parameter by the plan."""
        return tuple(self.plan.parameters.get(name, (Replicate(),) * self.plan.mesh.ndim))


def _class_of(model_class: Any, name: Any, library: Any, options: Mapping[str, Any]) -> Any:
    """The class of the model: `model_class`, or the class that it chooses by the configuration."""
    if hasattr(model_class, "from_config"):
        taken = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "trust_remote_code")
        config = options.get("config") or library.AutoConfig.from_pretrained(
            name, **{key: value for key, value in options.items() if key in taken}
        )
        with torch.device("meta"):
            model_class = type(model_class.from_config(config))
    if not (isinstance(model_class, type) and issubclass(model_class, library.PreTrainedModel)):
        raise ArgumentError(
            f"from_pretrained of {shown(model_class)}: give a class of models of transformers, such as "
            "AutoModelForCausalLM"
        )
    return model_class


def _device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _lay_out(model: nn.Module, mesh: DeviceMesh, plan: PlanArgument, example: dict[str, Any]) -> _Load:
    """Give the parameters of a model without data the layouts in which they are read; return the plan of loading."""
    load = _Load(chosen_plan(model, mesh, plan, plan_options(model, None, None), (), example), known_forms(model))

    def laid_out(name: str, p: Tensor) -> Tensor:
        placements, form = load.placements_of(name), form_of(name, load.forms)
        if form is not None:
            placements = form.while_loading(tuple(p.shape), placements, load.plan.mesh)
        layout = layout_of(load.plan.mesh, placements, p.dim())
        if layout.blocks:  # transformers reads ranges
            placements = torch_placements(layout.unblocked())
        return distribute_tensor(p, load.plan.mesh, placements, src_data_rank=None)

    replace_parameters(model, laid_out)
    return load


def _move_as_planned(model: nn.Module, load: _Load) -> None:
    """Redistribute the parameters that were read in other placements than the plan's."""

    converted = converted_forms(model)

    def moved(name: str, p: Tensor) -> Tensor:
        placements = load.placements_of(name)
        has_blocks = bool(layout_of(load.plan.mesh, placements, p.dim()).blocks)
        if not isinstance(p, Wrapper) or not (has_blocks or form_of(name, load.forms)):
            return p
        with torch.no_grad():
            planned = nn.Parameter(as_planned(p, form_of(name, converted), placements), p.requires_grad)
        planned.__dict__.update({key: value for key, value in p.__dict__.items() if key not in planned.__dict__})
        return planned

    replace_parameters(model, moved)


def _adopt_tensors(model: nn.Module) -> None:
    """Replace torch's distributed tensors, which transformers loads, by dshard's, of the same memory."""

    def adopted(name: str, p: Tensor) -> Tensor:
        if is_torchs(p):
            detached: Any = p.detach()
            own = nn.Parameter(from_torch(detached), p.requires_grad)
            own.__dict__.update(p.__dict__)
            return own
        return p

    replace_parameters(model, adopted)
