"""The boundary of a parallelized module: inputs from, and outputs to, ordinary PyTorch code."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import count, pairwise
from typing import Any, NoReturn, TypeAlias, TypeVar
from zlib import crc32

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.jit import is_tracing  # type: ignore[attr-defined]

from dshard.callers import asked_by, overrides_method_of
from dshard.comm import (
    begin_rows,
    check_world,
    comparing,
    device_of,
    gather_objects,
    group_of_hosts,
    own_coordinate,
    publish_failure,
    taking_part,
    with_waits,
)
from dshard.compile.graph_functions import skip_frame
from dshard.core.comparisons import comparisons_on
from dshard.core.plain_tensors import declare_model
from dshard.core.transforms import is_written_down
from dshard.core.trees import GivenCopy, map_tensors, nested_tensors
from dshard.errors import ArgumentError, CompileError, LayoutError, PeerError
from dshard.layout import Layout, layout_of
from dshard.mesh import Mesh
from dshard.parallel.apply_plan import lay_out
from dshard.parallel.batch_rows import InputLayouts, Rows, argument_names, data_axes, data_coordinate, rows_alone
from dshard.parallel.given_containers import GivenCopies, begin_call, end_call
from dshard.parallel.inputs import STATES, Input, InputModes, Inputs, have_values, row_of
from dshard.parallel.numbered_hooks import after, before
from dshard.parallel.plan_values import ModelPlan
from dshard.parallel.same_program import Draws, compare_programs, ranks_alike, ranks_by_value
from dshard.placements import Placement, Replicate
from dshard.tensor import DTensor
from dshard.torch_private import pytree
from dshard.validate import check_type, shown

OutputForm: TypeAlias = str | Sequence[Placement] | None
"""The argument `outputs`: a name, placements, or None: plain for callers of `LIBRARIES`, else distributed."""

LIBRARIES = ("transformers", "trl")
"""Libraries whose code combines the outputs of a model with plain tensors."""
PASSING = ("dshard", "torch", "accelerate", "peft", "contextlib", "functools")
"""Libraries whose code passes on the outputs of a model."""


def checked_outputs(plan: ModelPlan, outputs: object) -> OutputForm:
    """Check the argument `outputs` of `parallelize`, and return it with placements of dshard."""
    if outputs is None or outputs in ("distributed", "plain"):
        return outputs
    way_out = "give 'distributed', 'plain' or placements, one for each mesh axis"
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise LayoutError(f"outputs={shown(outputs)}: {way_out}")
    return layout_of(plan.mesh, outputs, sys.maxsize).placements


class Outputs:
    """Converts the outputs of a model to tensors of the given `form`."""

    def __init__(self, plan: ModelPlan, form: OutputForm) -> None:
        self.plan, self.form = plan, form

    def __call__(self, out: object, rows: Rows | None) -> Any:
        """Convert the outputs `out` of a call whose inputs were `rows` of each data rank, None for global inputs."""
        if self.form == "distributed" or (self.form is None and type(out) is DTensor):
            return out
        if self.form is None:
            return _for_caller(out, rows)
        if self.form == "plain":
            if rows is not None:
                rows.declare_shares()
            return map_tensors(out, lambda x: plain(x, rows))
        return map_tensors(out, self._placed)

    def _placed(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(placements=self.form)  # type: ignore[arg-type]


def plain(x: Tensor, rows: Rows | None) -> Tensor:
    """A distributed tensor as a plain one: the global tensor, or this rank's `rows` of a batch."""
    if not isinstance(x, DTensor):
        return x
    if rows is None:
        return x.full_tensor()
    return rows.part(x) if x.dim() and x.shape[0] == rows.total else rows.whole(x)


def _for_caller(out: Any, rows: Rows | None) -> Any:
    """The outputs as the caller needs them: plain if the caller is of `LIBRARIES` and they are a `ModelOutput`.

    Such code indexes and concatenates them with plain tensors, as `generate` does. In a training step with a loss it
    uses only the loss, so the rest is not gathered. What overrides one of its methods, as `compute_loss` of the
    Trainer, gets the same plain tensors and may use all of them.
    """
    if is_dynamo_compiling() or not _is_model_output(out):
        return out
    is_overriding = overrides_method_of(*LIBRARIES, through=PASSING)
    if not (is_overriding or asked_by(*LIBRARIES, through=PASSING)):
        return out
    loss = None if is_overriding else out.get("loss")
    if torch.is_grad_enabled() and isinstance(loss, DTensor) and loss.requires_grad:
        step_output = copy(out)
        step_output["loss"] = plain(loss, rows)
        return step_output
    return map_tensors(out, lambda x: plain(x, rows))


def _is_model_output(out: object) -> bool:
    return any(c.__name__ == "ModelOutput" and c.__module__.startswith("transformers.") for c in type(out).__mro__)


BatchT = TypeVar("BatchT")


class Boundary:
    """The conversion of one model's inputs and outputs; an attribute of the model, shared with its copies."""

    def __init__(
        self,
        plan: ModelPlan,
        modes: InputModes,
        outputs: object,
        seed_alike: bool = False,
        digests: tuple[int, int] = (0, 0),
    ) -> None:
        self.outputs = Outputs(plan, checked_outputs(plan, outputs))
        differ = compare_programs(plan, modes.per_data_rank, seed_alike, digests)
        draws = Draws(differ, modes.per_data_rank, plan.mesh)
        self.plan, self.inputs = plan, Inputs(plan, modes, draws, self.outputs.form == "plain")
        self.given: GivenCopies = []
        self.comparisons, self.sent = comparisons_on(plan.mesh), 0
        self.has_processes = taking_part(plan.mesh) is not None
        declare_model(self, Layout(plan.mesh, rows_alone(plan.inputs[""])), modes.per_data_rank)

    def new(self, x: Tensor) -> Any:
        """A tensor that the model has put into a container of its caller, as its outputs are."""
        precision = self.plan.precision
        return self.outputs(x if precision is None else precision.output(x), self.inputs.rows)

    def check_graph(self, inputs: object) -> None:
        """Refuse to be written down in a graph without redistributions, if the model has any."""
        are_whole = all(p == Replicate() for own in self.plan.parameters.values() for p in own)
        if is_tracing():
            graph, rest = "torch.jit.trace", ""
        elif are_whole and all(isinstance(x, DTensor) for x in nested_tensors(inputs)):
            return
        else:
            graph = (
                "torch.export" if is_exporting() else "make_fx or torch.func.linearize (torch.func.jvp needs no graph)"
            )
            rest = ", but takes distribute_batch(model, inputs) where parameters are replicated"
        raise self._no_graph(graph, rest)

    def prepare_scriptable(self) -> NoReturn:
        """Refuse `torch.jit.script`, which asks the model's `__prepare_scriptable__` first."""
        raise self._no_graph("torch.jit.script", "")

    def _no_graph(self, graph: str, rest: str) -> CompileError:
        return CompileError(
            f"{graph} of a model laid out by parallelize ({self.plan.strategy!r}): it writes down no redistributions"
            f"{rest}. torch.compile(model) does; or give it the model without parallelize, with the values "
            "{name: x.full_tensor() for name, x in model.state_dict().items()}, which all ranks make"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Boundary:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse to be pickled, for the model that is."""
        raise ArgumentError(
            f"a model laid out by parallelize ({self.plan.strategy!r}) cannot be pickled, nor saved whole: its hooks "
            "are of this process; save its state, dshard.checkpoint.save({'model': model}, path) or "
            "model.state_dict(), and load that into a model that parallelize laid out; copy.deepcopy(model) copies it"
        )


def set_boundary(model: nn.Module, boundary: Boundary) -> None:
    """Register the hook that lays out the model's inputs; before the hooks of its plan."""

    @skip_frame
    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_tracing() or is_written_down():
            boundary.check_graph((args, kwargs))
        if is_dynamo_compiling() and not boundary.inputs.per_data_rank:
            return None
        if boundary.has_processes:
            check_world(boundary.plan.mesh)
        copies: list[GivenCopy] = []  # torch.compile cannot trace list[GivenCopy]()
        laid_out = boundary.inputs((args, kwargs), lambda: argument_names(module), copies)
        begin_call(boundary.given, None if is_dynamo_compiling() else sys._getframe(1), copies)
        boundary.sent = boundary.comparisons.sent()
        if boundary.inputs.draws.differ or boundary.comparisons.are_due:
            boundary.inputs.draws.enter(module)
        return laid_out

    model.__dict__ = {"_dshard_boundary": boundary, **model.__dict__}  # first, so that pickle asks it before the hooks
    model.__dict__["__prepare_scriptable__"] = boundary.prepare_scriptable
    before(model, enter, with_kwargs=True)


def end_boundary(model: nn.Module, boundary: Boundary) -> None:
    """Register the hook that converts the model's outputs to the requested form; after the hooks of its plan.

    An error that ends the forward pass on this rank is published: the others wait for what follows the pass.
    """

    @skip_frame
    def leave(module: nn.Module, args: object, out: object) -> Any:
        error = None if is_dynamo_compiling() else sys.exc_info()[1]
        if isinstance(error, Exception) and getattr(error.__traceback__, "tb_frame", None) is sys._getframe(1):
            return publish_failure(error, boundary.plan.mesh.ranks)  # torch calls this hook where it handles the error
        if boundary.inputs.draws.before and not is_dynamo_compiling():
            boundary.inputs.draws.leave(module)
        converted = boundary.outputs(out, boundary.inputs.rows)
        end_call(boundary.given, None if is_dynamo_compiling() else sys._getframe(1), boundary.new)
        if not is_dynamo_compiling():
            has_sent = boundary.comparisons.sent() != boundary.sent
            if (has_sent or converted is not out) and is_grad_enabled():
                boundary.comparisons.watch(nested_tensors(converted), has_sent)
        return converted

    after(model, leave, always=True)


def own_boundary(model: nn.Module) -> Boundary | None:
    """The boundary of a module that `parallelize` has laid out itself, or None."""
    boundary = getattr(model, "_dshard_boundary", None)
    return boundary if isinstance(boundary, Boundary) else None


def boundary_of(model: nn.Module) -> Boundary:
    """The boundary of a model that `parallelize` has laid out, or of the only such module within it."""
    check_type(model, nn.Module, "the model", "give what parallelize returned")
    for module in model.modules():  # the model itself comes first
        boundary = own_boundary(module)
        if boundary is not None:
            return boundary
    raise ArgumentError(f"{type(model).__name__} is not laid out by parallelize: give what that returned")


def data_ranks(model: nn.Module) -> tuple[int, int]:
    """The number of data ranks of a parallelized model, and which of them this rank belongs to.

    A data rank is a coordinate on the mesh axes that shard the batch. In the order of torch's sampler:

        sampler = DistributedSampler(dataset, *dshard.data_ranks(model))
    """
    plan = boundary_of(model).plan
    mesh = plan.mesh
    coordinates = mesh.peers(data_axes(plan), (0,) * mesh.ndim)
    return len(coordinates), coordinates.index(data_coordinate(plan, own_coordinate(mesh)))


def distribute_batch(model: nn.Module, batch: BatchT) -> BatchT:
    """Plain tensors, nested in tuples, lists and dicts, as DTensors laid out as the inputs of a parallelized model.

    They are whole batches, or with `parallelize(..., inputs="per-data-rank")` the rows of this data rank. So targets
    have the layout of the model's outputs:

        x, y = dshard.distribute_batch(model, (x, y))
        loss = F.cross_entropy(model(x), y)
    """
    boundary = boundary_of(model)
    distributed: BatchT = lay_out(boundary.inputs(batch), boundary.plan, InputLayouts(boundary.plan), [])
    return distributed


# -- batches of a loader for as long as some data rank has any: those that have no more take part without rows

_LOOPS: Counter[Mesh] = Counter()
"""The loops over batches that this process has begun on each mesh; its other ranks have begun as many."""
_ENDED, _LOADED, _FAILED = range(3)
_STATE, _FORM, _INPUTS = 2, 3, 4
"""Columns of what ranks tell of a step: its loop, its number, one of the states above, a checksum of the batch's form,
and from there on the numbers by which inputs are compared."""


def batches(model: nn.Module, loader: Iterable[BatchT]) -> Iterator[BatchT]:
    """Batches of a loader, each as `distribute_batch` returns it, until no data rank of a parallelized model has any.

    So with `inputs="per-data-rank"` loaders may have different lengths: where one has ended batches have no rows, and
    the mean of a loss is that of all rows. With `outputs="plain"` batches are the plain rows of this data rank; the
    mean of none is NaN, with gradients of zero.

        for x, y in dshard.batches(model, loader):
            F.cross_entropy(model(x), y).backward()

    One batch is loaded ahead: before a step the ranks begin to ask who has one for the next, on a group of their own.

    Raises:
        LayoutError: ranks that must load alike have different batches, or ranks are in different loops.
        PeerError: the loader of another rank has raised an error; there that error is raised.
    """
    boundary = boundary_of(model)
    alone = group_of_hosts(boundary.plan.mesh) is None
    each: Iterator[BatchT] = iter(loader) if alone else _until_all_end(boundary.inputs, loader)
    return each if boundary.outputs.form == "plain" else (distribute_batch(model, batch) for batch in each)


def _until_all_end(inputs: Inputs, loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of this rank, and while only others have more, batches of their form without rows."""
    plan, group, known, form = inputs.plan, group_of_hosts(inputs.plan.mesh), None, b""
    columns = (_STATE, *range(_INPUTS, _INPUTS + STATES))
    for step, ((batch, own_form, error, wait), (*_, wait_ahead)) in enumerate(pairwise(_load(inputs, loader))):
        of_rank = wait()  # each rank finds the same errors
        rows = list(of_rank.values())
        if len({row[:_STATE] for row in rows}) > 1:
            _LOOPS[plan.mesh] = max(rows)[0]
            raise LayoutError(
                f"{ranks_by_value(of_rank, range(_STATE), plan.mesh)} are in different loops over dshard.batches, or "
                "at different steps of one: leave a loop, by break or by an error, on all ranks at the same step"
            )
        if any(row[_STATE] == _FAILED for row in rows):
            texts = gather_objects(error and f"{type(error).__name__}: {error}", group)
            rank, text = next(each for each in zip(sorted(plan.mesh.ranks), texts, strict=True) if each[1])
            raise error or PeerError(f"no rank has batch {step}, for the loader of rank {rank} has raised {text}")
        for alike in ranks_alike(of_rank, plan, inputs.per_data_rank):
            if len({tuple(row[c] for c in columns) for row in alike.values()}) > 1:
                raise LayoutError(inputs.differ(f"batch {step} of a loader, or its end", alike, columns))
        loaded = [row for row in rows if row[_STATE] == _LOADED]
        if not loaded:
            wait_ahead()  # nothing is left in flight, which may break off a program that ends now
            return
        if len(loaded) < len(rows) and loaded[0][_FORM] != known:
            known, form = loaded[0][_FORM], next(filter(None, gather_objects(own_form, group)))
        batch, is_on_host = (batch, True) if own_form else pickle.loads(form)
        yield batch if is_on_host else map_tensors(batch, lambda x: x.to(device_of(plan.mesh)))


def _load(inputs: Inputs, loader: Iterable[Any]) -> Iterator[tuple[Any, bytes, Exception | None, Any]]:
    """Load a batch for each step, without end: it, its form, the loader's error, and the rows of all ranks to come."""
    mesh, group = inputs.plan.mesh, with_waits(group_of_hosts(inputs.plan.mesh))
    _LOOPS[mesh] += 1
    iterator: Any = None
    for step in count():
        state, batch, form, error, named = _ENDED, None, b"", None, list[Input]()
        try:
            iterator = iter(loader) if step == 0 else iterator
            batch = next(iterator)
            state, named = _LOADED, inputs.named(batch, None)
            form = _form(batch, named) if inputs.per_data_rank else b"whole"
        except StopIteration:
            iterator = iter(())  # one that goes on after its end is asked no more
        except Exception as raised:  # the other ranks wait for this one
            state, error, iterator = _FAILED, raised, iter(())
        compares = (step == 0 or comparing()) and have_values([each.x for each in named])
        row = [_LOOPS[mesh], step, state, crc32(form), *row_of(named, compares)[:STATES]]
        yield batch, form, error, begin_rows(torch.tensor(row, device="cpu"), mesh, group)


def _form(batch: Any, named: list[Input]) -> bytes:
    """The pickled batch without its rows, with what is whole, for ranks that have none; and whether it is on hosts."""
    n_rows = row_of(named, False)[1]
    rows = {id(each.x) for each in named if each.mode != "global" and each.x.shape[:1] == (n_rows,)}
    empty = map_tensors(batch, lambda x: (x.new_empty((0, *x.shape[1:])) if id(x) in rows else x).detach().cpu())

    def are_texts(x: Any) -> bool:  # of which `DataLoader` makes no tensor, though they are rows
        return type(x) in (list, tuple) and len(x) == (n_rows or len(x)) and all(isinstance(each, str) for each in x)

    empty = pytree.tree_map(lambda x: x[:0] if are_texts(x) else x, empty, is_leaf=are_texts)
    return pickle.dumps((empty, all(each.x.is_cpu for each in named)))
