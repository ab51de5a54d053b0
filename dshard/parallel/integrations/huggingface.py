"""Parallelized models of Hugging Face's transformers and peft: `generate`, `save_pretrained`, the Trainer, accelerate.

transformers has hooks for models that were laid out when loaded; a parallelized model implements them in a subclass of
its class. Nothing of transformers is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dshard.callers import callers
from dshard.comm import group_rank, runtime_of
from dshard.compile.graph_functions import skip_frame
from dshard.core.plain_tensors import implicit_replication
from dshard.core.trees import map_tensors
from dshard.errors import LayoutError
from dshard.factories import zeros
from dshard.ops.random import seeded_alike
from dshard.parallel.apply_plan import take_inputs
from dshard.parallel.batch_rows import Rows, data_axes
from dshard.parallel.boundary import PASSING, Boundary, Outputs, boundary_of, data_ranks, end_boundary, set_boundary
from dshard.parallel.expert_modules import derived
from dshard.parallel.inputs import InputModes, Inputs
from dshard.parallel.numbered_hooks import before
from dshard.parallel.plan_values import ModelPlan
from dshard.parallel.same_program import Draws
from dshard.placements import Partial, Replicate
from dshard.tensor import DTensor

if TYPE_CHECKING:

    class _Model(nn.Module):
        device: torch.device
        config: Any
        base_model: nn.Module

        def generate(self, *args: object, **kwargs: object) -> Any: ...

        def save_pretrained(self, *args: Any, **kwargs: Any) -> None: ...

        def initialize_weights(self, *args: object, **kwargs: object) -> None: ...
else:
    _Model = object


class Adopted(_Model):
    """The mixin of a class that no module has by its name: a copy is made of it, and a pickle refused."""

    @skip_frame
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The forward pass; to the Trainer a loss that its factor for other wrappers makes the right one.

        It counts the targets of all ranks, and multiplies the loss by the number of ranks, over which others take the
        mean of gradients. Told not to, it counts those of each rank, which are added up here.
        """
        targets = kwargs.get("num_items_in_batch")
        if targets is None or isinstance(targets, DTensor) or not boundary_of(self).inputs.per_data_rank:
            return super().__call__(*args, **kwargs)  # laid out is what an outer model of peft was given
        trainer = _trainer_that_calls()
        if trainer is None:
            return super().__call__(*args, **kwargs)
        if trainer.args.average_tokens_across_devices:
            return _with_loss(super().__call__(*args, **kwargs), 1 / data_ranks(self)[0], "labels" in kwargs)
        kwargs["num_items_in_batch"] = _added_up(targets, boundary_of(self).plan)
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The parts that `copy` puts together again; pickle begins with the boundary, which refuses."""
        state = super().__reduce_ex__(protocol)[2]
        return _blank, (boundary_of(self), type(self)), state


def _blank(boundary: Boundary, cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


class ParallelizedModel(Adopted):
    """The mixin of a parallelized model's class, before the model's own class of transformers."""

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the Trainer gives the model a number of targets, as it gives the model's own class."""
        own = getattr(super(), "accepts_loss_kwargs", None)
        kinds = {each.kind for each in signature(type(self).forward).parameters.values()}
        return Parameter.VAR_KEYWORD in kinds if own is None else bool(own)

    def generate(self, *args: object, **kwargs: object) -> Any:
        """`generate` of transformers; all ranks call it, and each gets the tokens for its inputs, as plain tensors.

        Sampled tokens follow `dshard.manual_seed`, and are the same on every mesh.
        """
        boundary = boundary_of(self)
        mesh = boundary.plan.mesh
        args, kwargs = map_tensors((args, kwargs), as_global)
        rows = None
        if boundary.inputs.per_data_rank:
            args, kwargs = map_tensors(boundary.inputs((args, kwargs)), as_global)
            rows = boundary.inputs.rows
        with global_batches(boundary), implicit_replication(), seeded_alike("generate", mesh, self.device):
            out = super().generate(*args, **kwargs)
        if rows is None:
            return out
        first = sum(rows.by_data_rank[: data_ranks(self)[1]])
        return map_tensors(out, lambda x: _own_part(x, rows, first))

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """True, so that the Trainer and accelerate do not wrap the model or reduce its gradients."""
        _check_data_of_trainer(boundary_of(self))
        return True

    def gather_sharded_state_dict_for_save(
        self, model_to_save: nn.Module, state_dict: dict[str, object], *args: object, save_on_this_rank: bool = True
    ) -> dict[str, Any]:
        """The global tensors of a state on the CPU, on the rank that writes them; empty on others."""
        return gathered(model_to_save, state_dict, save_on_this_rank)


class ParallelizedAdapters(Adopted):
    """A parallelized model of peft."""

    def save_pretrained(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """`save_pretrained` of peft; all ranks call it, and the first writes the global adapters."""
        writes = kwargs.pop("is_main_process", True) and group_rank() == 0
        state = kwargs.pop("state_dict", None)
        if state is None:
            trained = {name for name, p in self.named_parameters(remove_duplicate=False) if p.requires_grad}
            prefix, every = getattr(self.base_model, "prefix", ""), kwargs.get("save_embedding_layers") is True
            state = {n: x for n, x in self.state_dict().items() if every or n in trained or prefix in n}
        state = gathered(self, state, writes)
        if writes:
            super().save_pretrained(save_directory, *args, is_main_process=True, state_dict=state, **kwargs)


def _allocate_in_shards(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """Allocate the keys and values of a static cache's layer in the layouts of these, the first ones."""
    del layer.lazy_initialization  # this function, in front of the method of its class
    layer.lazy_initialization(key_states, value_states)
    layer.keys, layer.values = _laid_out_as(key_states, layer.keys), _laid_out_as(value_states, layer.values)


def _laid_out_as(states: Tensor, empty: Tensor) -> Tensor:
    """Zeros like `empty` in the layout of `states`, replicated where these are partial."""
    if not isinstance(states, DTensor):
        return empty
    mesh = states.layout.mesh
    placements = [Replicate() if isinstance(p, Partial) else p for p in states.placements]
    return zeros(tuple(empty.shape), dtype=empty.dtype, device_mesh=mesh, placements=placements)


def shard_static_caches(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Let the static caches among the inputs of a model be allocated in shards, which transformers makes plain."""
    caches = sys.modules["transformers"].cache_utils
    for cache in (*args, *kwargs.values()):
        if isinstance(cache, caches.EncoderDecoderCache):
            parts = [cache.self_attention_cache, cache.cross_attention_cache]
        else:
            parts = [cache] if isinstance(cache, caches.Cache) else []
        for layer in (layer for part in parts for layer in part.layers):
            if isinstance(layer, caches.StaticLayer) and not layer.is_initialized:
                layer.lazy_initialization = partial(_allocate_in_shards, layer)


def _check_data_of_trainer(boundary: Boundary) -> None:
    """Refuse the Trainer, which loads other rows on each rank, if ranks must take the same rows."""
    mesh, shared = boundary.plan.mesh, _ranks_per_batch(boundary)
    if runtime_of(mesh) is None or mesh.size == 1 or shared == 1 or mesh.device_type != "cpu":
        return
    if not boundary.inputs.per_data_rank:
        raise LayoutError(
            "the Trainer gives each rank rows of its own, and this model takes whole batches, alike on all ranks: "
            "parallelize(..., inputs='per-data-rank')"
        )
    raise LayoutError(
        f"the Trainer gives each rank of a CPU rows of its own, and {boundary.plan.strategy!r} on ({mesh}) needs the "
        f"same ones on {shared} ranks each: use 'data' or 'fsdp', or write the loop, with a sampler of "
        "dshard.data_ranks(model)"
    )


def _ranks_per_batch(boundary: Boundary) -> int:
    """The number of ranks that take the same rows."""
    mesh = boundary.plan.mesh
    axes = data_axes(boundary.plan) if boundary.inputs.per_data_rank else ()
    rest = mesh.size
    for name in axes:
        rest //= mesh.shape[mesh.axis(name)]
    return rest


@contextmanager
def global_batches(boundary: Boundary) -> Iterator[None]:
    """Within the block the model takes whole batches and returns plain tensors."""
    before, plan = (boundary.inputs, boundary.outputs), boundary.plan
    boundary.inputs = Inputs(plan, InputModes({}, "global"), Draws({}, False, plan.mesh))
    boundary.outputs = Outputs(plan, "plain")
    try:
        yield
    finally:
        boundary.inputs, boundary.outputs = before


def _trainer_that_calls() -> Any:
    """The Trainer of transformers whose code calls a model, if that is who does."""
    outside = (f for f in callers() if f.f_globals.get("__name__", "").partition(".")[0] not in PASSING)
    frame = next(outside, None)  # none in a thread that a library runs
    if frame is None or frame.f_globals.get("__name__", "") != "transformers.trainer":
        return None
    trainer = frame.f_locals.get("self")
    return trainer if hasattr(trainer, "args") else None


def _with_loss(out: Any, factor: float, is_first: bool) -> Any:
    """The outputs of a model with its loss, the first of a tuple, multiplied by a factor."""
    if isinstance(out, dict):
        if out.get("loss") is not None:
            out["loss"] = out["loss"] * factor
        return out
    return (out[0] * factor, *out[1:]) if is_first and isinstance(out, tuple) else out


def _added_up(number: Any, plan: ModelPlan) -> DTensor:
    """A number that each data rank has, added up when it is used."""
    axes = data_axes(plan)
    terms = [Partial() if name in axes else Replicate() for name in plan.mesh.names]
    return DTensor.from_local(torch.as_tensor(number), plan.mesh, terms)


def _own_part(x: Tensor, rows: Rows, first: int) -> Tensor:
    """This rank's part of a result that has, for each row of all data ranks, equally many entries."""
    each, rest = divmod(x.shape[0], max(rows.total, 1)) if x.dim() else (0, 0)
    return x[first * each : (first + rows.own) * each] if each and not rest else x


def as_global(x: object) -> Any:
    """A distributed tensor as a plain global tensor on every rank; any other value unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gathered(model: nn.Module, state: dict[str, object], kept: bool) -> dict[str, Any]:
    """The state of a model with global tensors on the CPU, tied ones once; empty on ranks where it is not `kept`.

    Such a rank holds one global tensor at a time. All ranks call it.
    """
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    out: dict[str, object] = {}
    by_parameter: dict[object, object] = {}
    for name, value in state.items():
        key = parameters.get(name, name)
        if key not in by_parameter:
            tensor = as_global(value)
            tensor = tensor.detach().cpu().contiguous() if isinstance(tensor, Tensor) else tensor
            by_parameter[key] = tensor if kept else None
        if kept:
            out[name] = by_parameter[key]
    return out


def wrap_for_huggingface(model: nn.Module, boundary: Boundary) -> None:
    """Give the models of transformers and peft in `model` the classes of parallelized models."""
    library, peft = sys.modules.get("transformers"), sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        model.__class__ = derived(ParallelizedAdapters, type(model))
    if library is None:
        return
    inner: set[nn.Module] = set()
    for module in model.modules():  # the outer ones first
        if isinstance(module, library.PreTrainedModel) and module not in inner:
            inner |= set(module.modules())
            if not isinstance(module, ParallelizedModel):
                _adopt_one(module, library, boundary)


def _adopt_one(model: Any, library: Any, boundary: Boundary) -> None:
    model.__class__ = derived(ParallelizedModel, type(model))
    before(model, shard_static_caches, with_kwargs=True)
    if "_dshard_boundary" not in model.__dict__:  # it is called by itself, too, as by `generate` of peft
        set_boundary(model, boundary)
        take_inputs(model, replace(boundary.plan, calls=()), None, boundary.given)  # the outer module has their names
        end_boundary(model, boundary)
    shared, plan = _ranks_per_batch(boundary), boundary.plan
    if runtime_of(plan.mesh) is not None:
        sizes = {"tp_size": shared, "fsdp_size": plan.mesh.size // shared}
        model.config.distributed_config = library.distributed.DistributedConfig(**sizes)
        if shared > 1 and plan.mesh.device_type != "cpu":
            model._tp_size = shared  # for which accelerate loads the same rows; it knows no such groups on a CPU
