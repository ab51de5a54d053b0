"""Trace a model's forward pass, without data, into the graph of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard.comm import plain
from dshard.core.trees import map_tensors, nested_tensors
from dshard.parallel.expert_modules import experts_as_operators
from dshard.parallel.factors import stand_in_for, without_data
from dshard.parallel.forward_values import ForwardValues, named_inputs
from dshard.parallel.reachable_state import ReachableState
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_recorder import GraphRecorder
from dshard.torch_private import disable_modes


@plain()
@disable_modes()
def trace_step(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], reached: ReachableState | None = None
) -> StepGraph:
    """The graph of a forward pass of `model`, run without data; nothing of what it writes stays.

    Shapes are those of the global tensors. The backward pass is the forward pass transposed, and is not recorded.
    `reached` is the state that the model and the batch lead to, for callers that have it.

    Raises:
        LayoutError: the pass reads a value that depends on inputs without data.
        RuntimeError, NotImplementedError: what torch raises for an operator that does not run without data.
    """
    reached = reached or ReachableState(model, args, kwargs)
    stand_ins = {id(x): stand_in_for(x, without_data) for x in reached.tensors}
    recorder = GraphRecorder()
    for name, x in model.named_parameters():
        recorder.leaf(stand_ins[id(x)], "parameter", name)
    for name, buffer in model.named_buffers():
        recorder.leaf(stand_ins[id(buffer)], "buffer", name)
    example = named_inputs(model, tuple(args), kwargs)
    args, kwargs = map_tensors((tuple(args), dict(kwargs)), lambda x: without_data(x.detach()))
    inputs = [(x, data, name) for x, (data, name) in zip(nested_tensors((args, kwargs)), example, strict=True)]
    for stand_in, _, name in inputs:
        recorder.leaf(stand_in, "input", name)
    values = ForwardValues(model, [*((stand_ins[id(x)], x, None) for x in reached.tensors), *inputs], lambda *_: None)
    with reached.replaced(stand_ins), experts_as_operators(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        for name, module in model.named_modules():
            _follow(recorder, name, module)
        with recorder.recording(), values:
            out = model(*args, **kwargs)
    graph = recorder.graph(nested_tensors(out))
    return replace(graph, answers=tuple(values.answers))


def _follow(recorder: GraphRecorder, name: str, module: nn.Module) -> None:
    """Register hooks by which the recorder knows the module that runs."""
    if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
        module.register_forward_pre_hook(lambda module, args: recorder.enter(name))
        module.register_forward_hook(lambda module, args, out: recorder.leave(), always_call=True)
