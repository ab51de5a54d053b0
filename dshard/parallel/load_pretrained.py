"""`from_pretrained` onto a mesh: each rank reads only its shards of each file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dshard.comm import DeviceMesh, as_mesh
from dshard.core.plain_tensors import from_torch, implicit_replication, is_torchs
from dshard.core.wrapper import Wrapper
from dshard.distribute import distribute_tensor
from dshard.errors import ArgumentError, MeshError
from dshard.parallel.apply_plan import replace_parameters
from dshard.parallel.huggingface import ParallelizedModel, newly_derived
from dshard.parallel.model_plan import PlanArgument, chosen_plan, parallelize
from dshard.parallel.plan_options import plan_options
from dshard.parallel.plan_values import Plan
from dshard.parallel.stored_forms import StoredForm, as_planned, converted_forms, form_of, known_forms
from dshard.placements import Placement, Replicate
from dshard.torch_dtensor import TorchDTensor
from dshard.validate import shown


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

    plan: Plan
    forms: Sequence[StoredForm]

    def placements_of(self, name: str) -> tuple[Placement, ...]:
        """The placements of a parameter by the plan."""
        return tuple(self.plan.parameters.get(name, (Replicate(),) * self.plan.mesh.ndim))


def _class_of(model_class: Any, name: Any, library: Any, options: Mapping[str, Any]) -> Any:
    """The class of the model: `model_class`, or the class that it chooses by the configuration.

    Raises:
        ArgumentError: no class of models of transformers.
    """
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
        return distribute_tensor(p, load.plan.mesh, placements, src_data_rank=None)

    replace_parameters(model, laid_out)
    return load


def _move_as_planned(model: nn.Module, load: _Load) -> None:
    """Redistribute the parameters that were read in other placements than the plan's."""

    converted = converted_forms(model)

    def moved(name: str, p: Tensor) -> Tensor:
        if form_of(name, load.forms) is None or not isinstance(p, Wrapper):
            return p
        with torch.no_grad():
            planned = nn.Parameter(as_planned(p, form_of(name, converted), load.placements_of(name)), p.requires_grad)
        planned.__dict__.update({key: value for key, value in p.__dict__.items() if key not in planned.__dict__})
        return planned

    replace_parameters(model, moved)


def _adopt_tensors(model: nn.Module) -> None:
    """Replace torch's distributed tensors, which transformers loads, by dshard's, of the same memory."""

    def adopted(name: str, p: Tensor) -> Tensor:
        if isinstance(p, TorchDTensor) and is_torchs(p):
            detached: Any = p.detach()
            own = nn.Parameter(from_torch(detached), p.requires_grad)
            own.__dict__.update(p.__dict__)
            return own
        return p

    replace_parameters(model, adopted)
