"""`Pipeline`: stages on meshes of their own, run by a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from dshard.comm import device_of, group_of, runtime_of
from dshard.core.signature import Function
from dshard.errors import MeshError, ScheduleError
from dshard.ops.foreach import STAGES
from dshard.pipeline.costs import Costs
from dshard.pipeline.program import Compute, Program, edges_of, names_of
from dshard.pipeline.runner import TARGET, Reduction, Runner, cut_batch
from dshard.pipeline.simulator import DELAYS, choose
from dshard.pipeline.stage import Stage
from dshard.pipeline.tied import tied_of
from dshard.tensor import DTensor
from dshard.torch_private import infinite_gradients
from dshard.validate import as_number, as_tuple, check_callable, check_one_of, check_type

AUTO = "auto"
_PIPELINES_OF: Counter[tuple[int, ...]] = Counter()


class Pipeline:
    """Stages that run microbatch by microbatch, each on its own mesh; made by all ranks of all stages, in one order.

    A stage gets each input from the last earlier stage with an output of that name, or from the batch. `loss(*outputs,
    target)` of the last stage is a mean over samples, or a sum with `reduction="sum"`; without `loss` the last stage
    returns the loss. Gradients are those of the full batch.

    `schedule` is "gpipe", "1f1b", "eager-1f1b", or "auto": the fastest in simulation for these `costs` under which no
    rank holds more than `budget` bytes. `delay` splits each backward, so that gradients of inputs are sent first, and
    gradients of weights follow after the next `delay` microbatches. Without `overlap` a stage waits for its sends. A
    message that does not arrive within `timeout` seconds is an error.

    Each of `tied` names the copies of one parameter in several stages, as in ("0.words.weight", "3.head.weight"): all
    begin with the values of the first, and after each step all have the sum of their gradients.

    Raises:
        ScheduleError: invalid stages or schedule, or a parameter in several stages.
        MeshError: meshes that share ranks, or this rank is in none.
        MixedError: a parameter of this rank's stage is not on its mesh.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        n_microbatches: int,
        schedule: str = "1f1b",
        loss: Function | None = None,
        batch: Sequence[str] = ("x",),
        reduction: Reduction = "mean",
        delay: int | None = None,
        overlap: bool = True,
        costs: Costs | None = None,
        budget: int | None = None,
        timeout: float = 300.0,
        tied: Sequence[Sequence[str]] = (),
    ) -> None:
        way_out = "give each a Stage(module, mesh)"
        self.stages: tuple[Stage, ...] = as_tuple(stages, "stages", way_out, ScheduleError)
        if not self.stages:
            raise ScheduleError(f"a pipeline without stages: {way_out}")
        for stage in self.stages:
            check_type(stage, Stage, "a stage", way_out, ScheduleError)
        self.batch, self._reduction = names_of(batch, "batch"), reduction
        _check_options(self.batch, reduction, loss, timeout)
        if schedule != AUTO and (costs is not None or budget is not None):
            raise ScheduleError(f'costs and budget choose a schedule, and {schedule!r} is given: use schedule="auto"')
        self.edges = edges_of([(stage.takes, stage.gives) for stage in self.stages], self.batch)
        _check_tied(self.stages)
        self.number = _number(self.stages)
        self.stages[self.number].check(self.number)
        if schedule == AUTO:
            if costs is None:
                raise ScheduleError('schedule="auto" chooses by the costs of the stages: give costs=Costs(...)')
            way_out = "give Costs(stages, edges), as pipeline.uniform makes them"
            check_type(costs, Costs, "costs", way_out, ScheduleError)
            if len(costs.stages) != len(self.stages):
                raise ScheduleError(f"costs of {len(costs.stages)} stages for a pipeline of {len(self.stages)}")
            delays = DELAYS if delay is None else (delay,)
            self.program = choose(costs, n_microbatches, self.edges, budget, delays).program
        else:
            self.program = Program(schedule, len(self.stages), n_microbatches, self.edges, delay, overlap)
        ranks = tuple(sorted(rank for stage in self.stages for rank in stage.layout_mesh.ranks))
        _PIPELINES_OF[ranks] += 1
        name = f"dshard.pipeline/{','.join(map(str, ranks))}/{_PIPELINES_OF[ranks]}"
        self._runner = Runner(self.stages, self.number, name, self.edges, loss, timeout)
        self._group = self._join(ranks)
        self.unscales = False
        if len(self.stages) > 1:
            STAGES[self.stages[self.number].layout_mesh] = self
        self._runner.tied = tied_of(tied, self.stages, self.number, self._group.process_group)

    @property
    def module(self) -> Any:
        """The module of this rank's stage."""
        return self.stages[self.number].module

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stage that require a gradient: pass them to its optimizer."""
        return self.stages[self.number].parameters()

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another; may be set."""
        return self._runner.channels.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        as_number(seconds, "timeout", ScheduleError, infinite=True)
        self._runner.channels.timeout = seconds

    @property
    def seconds(self) -> list[tuple[Compute, float]]:
        """The computations of this rank in the last step, in order, with the seconds of each, without waiting."""
        return self._runner.seconds

    def step(self, batch: Tensor | Mapping[str, Tensor], target: Tensor | None = None) -> Tensor:
        """Run a step: return the loss of the batch on every rank, and accumulate gradients in the parameters.

        Every rank passes the full batch: a tensor if the batch has one name, else a tensor for each name. It is cut
        into microbatches along dim 0, the last of which may be smaller. Under `torch.no_grad()`, on all ranks, there
        are no backward passes, and no gradients: the loss is that of an evaluation.

        Raises:
            ShapeError: a batch that cannot be cut so.
            PipelineError: a rank died or did not answer; names the rank and the action.
        """
        if not isinstance(batch, Mapping):
            check_type(batch, Tensor, "the batch", "give a tensor, or one for each name of the batch")
        values = dict(batch) if isinstance(batch, Mapping) else dict.fromkeys(self.batch[:1], batch)
        if set(values) != set(self.batch):
            raise ScheduleError(f"the batch has {', '.join(values)}, and the pipeline takes {', '.join(self.batch)}")
        if target is not None:
            values[TARGET] = target
        microbatches = cut_batch(values, self.program.n_microbatches, self._reduction)
        loss = self._runner.run(self.program, microbatches, [microbatch.shapes for microbatch in microbatches])
        return self._runner.shared(loss, self.stages[-1], self._group, "the loss")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages together, and return their norm before, on every rank, as torch's does.

        All ranks call it. The copies of a tied parameter count once.
        """
        parameters = self.parameters()
        elsewhere = [tied.later_copy for tied in self._runner.tied]
        counted = [p.grad for p in parameters if p.grad is not None and not any(p is copy for copy in elsewhere)]
        norm: Any = get_total_norm(counted, norm_type)
        here = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms = [
            self._runner.shared(here if i == self.number else None, stage, self._group, "the norm of gradients")
            for i, stage in enumerate(self.stages)
        ]
        total = get_total_norm(norms, norm_type)
        clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Unscale the gradients of this rank's stage, as `scaler.unscale_` does; all stages learn of infinite ones.

        All ranks call it, each with its scaler and optimizer, before `scaler.step`: then all stages step, or none.
        `loss` scales what it returns: `lambda out, target: scaler.scale(F.mse_loss(out, target))`.
        """
        if not scaler.is_enabled():
            return
        device = device_of(self.stages[self.number].layout_mesh)
        scaler.scale(torch.zeros((), device=device))  # which makes the scale of stages that have no loss
        self.unscales = True
        try:
            scaler.unscale_(optimizer)
        finally:
            self.unscales = False
        found = infinite_gradients(scaler, optimizer)
        here = sum(found.values(), torch.zeros((), device=device)).to(device)
        flags = [
            self._runner.shared(here if i == self.number else None, stage, self._group, "whether gradients are finite")
            for i, stage in enumerate(self.stages)
        ]
        for flag in found.values() or [found.setdefault(device, here)]:
            flag.copy_(sum(flags))  # type: ignore[arg-type]

    def _join(self, ranks: tuple[int, ...]) -> Any:
        """Create the process groups of the edges, in the same order on all ranks, and the group of all ranks."""
        runtime = runtime_of(self.stages[self.number].layout_mesh)
        assert runtime is not None
        pairs = [
            tuple(sorted({*self.stages[src].layout_mesh.ranks, *self.stages[dst].layout_mesh.ranks}))
            for src, dst in sorted({(edge.src, edge.dst) for edge in self.edges})
            if self.number in (src, dst)
        ]
        for pair in pairs:
            for tag in (0, 1):  # activations, gradients
                group_of(pair, runtime, tag)
        self._runner.groups = tuple({*pairs, ranks})
        return group_of(ranks, runtime)


def _check_options(batch: Sequence[str], reduction: object, loss: object, timeout: object) -> None:
    if len(set(batch)) < len(batch) or TARGET in batch:
        raise ScheduleError(f"the batch has {', '.join(batch)}: name each value once; {TARGET!r} is given to step")
    check_one_of(reduction, get_args(Reduction), "reduction", ScheduleError)
    if loss is not None:
        check_callable(loss, "loss", "give a function of the outputs and the target, such as F.mse_loss")
    as_number(timeout, "timeout", ScheduleError, infinite=True)


def _check_tied(stages: Sequence[Stage]) -> None:
    seen: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters().items():
            other, there = seen.setdefault(id(parameter), (number, name))
            if other != number:
                raise ScheduleError(
                    f"the parameter {there} of stage {other} is also {name} of stage {number}: each stage would train "
                    "a copy of its own; keep both uses in one stage, or give each a copy and name both in tied=..."
                )


def _number(stages: Sequence[Stage]) -> int:
    """The number of this rank's stage."""
    owner: dict[int, int] = {}
    here = None
    for number, stage in enumerate(stages):
        mesh = stage.layout_mesh
        for rank in mesh.ranks:
            if rank in owner:
                raise MeshError(
                    f"rank {rank} is in stages {owner[rank]} and {number}: give each stage ranks of its own"
                )
            owner[rank] = number
        runtime = runtime_of(mesh)
        if runtime is None:
            raise MeshError(f"the mesh ({mesh}) of stage {number} has no processes: use a DeviceMesh, under torchrun")
        here = number if runtime.coordinate is not None else here
        rank_here = runtime.rank
    if here is None:
        raise MeshError(f"rank {rank_here} is in no stage, and takes no part: make the Pipeline on the others alone")
    return here
