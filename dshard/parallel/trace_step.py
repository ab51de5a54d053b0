"""Run a model's forward pass, without data, and record its calls: plans of all kinds are made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard.comm import has_only_shape, plain
from dshard.core.local_checks import refuse_other_forms
from dshard.core.observe import observing
from dshard.core.trees import map_tensors, nested_tensors
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.ops.fused_loss.fused_call import OF_WHOLE_LOGITS
from dshard.parallel.batch_rows import argument_tensors
from dshard.parallel.expert_modules import experts_as_operators
from dshard.parallel.forward_values import ForwardValues
from dshard.parallel.gather_groups import block_within, blocks_of
from dshard.parallel.numbered_hooks import without_earlier_hooks
from dshard.parallel.reachable_state import ReachableState
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_recorder import GraphRecorder
from dshard.planning.uncollected import uncollected
from dshard.torch_private import disable_modes


class RecordedStep(NamedTuple):
    """A forward pass of a model as it ran: its calls, the host values that it read, None on data, and its result."""

    model: nn.Module
    recorder: GraphRecorder
    answers: list[Any] | None
    out: object

    @plain()
    @disable_modes()
    @uncollected()
    def graph(self) -> StepGraph:
        """The graph of the step, in shapes of the global tensors.

        The backward pass is the forward pass transposed, and is not recorded.
        """
        graph = self.recorder.graph(nested_tensors(self.out))
        return replace(graph, kept=_kept(graph, [*blocks_of(self.model)]))


def _kept(graph: StepGraph, blocks: Sequence[str]) -> frozenset[str]:
    """The parameters that stay gathered between their passes: those of no block, and of the block that runs last."""
    calls = (block_within(blocks, call.module) for call in reversed(graph.calls))
    last = next((block for block in calls if block), "")
    own = {x.name: {block_within(blocks, graph.calls[call].module) for call, _ in x.uses} for x in graph.parameters()}
    return frozenset([name for name, within in own.items() if len(within) > 1 or within <= {"", last}])


@plain()
@disable_modes()
@uncollected()
def record_step(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], reached: ReachableState | None = None
) -> RecordedStep:
    """Run the forward pass of `model` without data, or on copies if it needs data; nothing of what it writes stays.

    `reached` is the state that the model and the batch lead to, for callers that have it.

    Raises:
        LayoutError: a pass that does not run without data, of a model or a batch that has none.
    """
    reached = reached or ReachableState(model, args, kwargs)
    try:
        return _recorded(model, args, kwargs, reached, without_data)
    except Exception as error:
        for path, x in argument_tensors(model, tuple(args), kwargs):
            refuse_other_forms(x, f"the input {'.'.join(path)}")
        for name, x in model.named_buffers():
            refuse_other_forms(x, f"the buffer {name}")
        if all(type(x) in (Tensor, nn.Parameter) and not has_only_shape(x) for x in reached.tensors):
            return _recorded(model, args, kwargs, reached, torch.clone)._replace(answers=None)
        if not isinstance(error, NotImplementedError | RuntimeError) or isinstance(error, LayoutError):
            raise
        if "meta" not in str(error).lower():
            raise
        raise LayoutError(
            f"the forward pass of {type(model).__name__} does not run without data ({str(error).partition('. ')[0]}): "
            "give a model and an example with data, or the placements of its parameters by name, {pattern: placements}"
        ) from error


def _recorded(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    reached: ReachableState,
    stand_in: Callable[[Tensor], Tensor],
) -> RecordedStep:
    """Run the forward pass of `model` on stand-ins of all tensors that it and the batch lead to, and record it."""
    stand_ins = {id(x): stand_in_for(x, stand_in) for x in reached.tensors}
    recorder = GraphRecorder()
    example = argument_tensors(model, tuple(args), kwargs)
    args, kwargs = map_tensors((tuple(args), dict(kwargs)), lambda x: stand_in(x.detach()))
    given = nested_tensors((args, kwargs))
    inputs = [(x, data, ".".join(path)) for x, (path, data) in zip(given, example, strict=True)]
    parameters = [(name, stand_ins[id(x)]) for name, x in model.named_parameters()]
    buffers = [(name, stand_ins[id(x)]) for name, x in model.named_buffers()]
    recorder.leaves({"parameter": parameters, "buffer": buffers, "input": [(name, x) for x, _, name in inputs]})
    known = [*((stand_ins[id(x)], x, None) for x in reached.tensors), *inputs]

    values = ForwardValues(model, known, recorder.function)
    of_experts = nullcontext() if stand_in is without_data else observing(lambda decision: None, found=recorder.found)
    with (
        without_earlier_hooks(model),
        reached.replaced(stand_ins),
        experts_as_operators(model),
        OF_WHOLE_LOGITS.entered(None),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        values,
        of_experts,
    ):
        out = recorder.record(model, args, kwargs)
    return RecordedStep(model, recorder, values.answers, out)


def without_data(x: Tensor) -> Tensor:
    """A plain meta tensor with the global shape, strides and dtype of `x`."""
    return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")


def stand_in_for(x: Tensor, stand_in: Callable[[Tensor], Tensor] = without_data) -> Tensor:
    """`stand_in(x)` for a tensor that a model holds: a parameter if `x` is one, with its attributes."""
    is_own = isinstance(x, Wrapper)  # whose layout is dshard's
    if not is_own and (x.layout != torch.strided or x.is_nested or x.is_quantized):
        return x
    out = stand_in(x.detach())
    out = nn.Parameter(out, x.requires_grad) if isinstance(x, nn.Parameter) else out.requires_grad_(x.requires_grad)
    if not is_own:
        vars(out).update(vars(x))
    return out
