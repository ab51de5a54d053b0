"""Layouts of whole models: by named strategies, the cheapest plan, or parameter names; torch's styles."""

from dshard.parallel.auto import Auto
from dshard.parallel.boundary import batches, data_ranks, distribute_batch
from dshard.parallel.checkpoint import checkpoint
from dshard.parallel.expert_modules import RECOGNISED, register_experts
from dshard.parallel.function_plan import FunctionPlan, plan_function
from dshard.parallel.in_graphs import loss_parallel
from dshard.parallel.integrations.experts import transformers_experts
from dshard.parallel.integrations.huggingface import wrap_for_huggingface
from dshard.parallel.integrations.pretrained import from_pretrained
from dshard.parallel.integrations.torch_styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from dshard.parallel.model_plan import AFTER_PARALLELIZE, parallelize, plan_model
from dshard.parallel.plan_table import PlanTable, RankedPlan, plan_table
from dshard.parallel.plan_values import Cost, Memory, ModelPlan, Moves
from dshard.parallel.planned_steps import plan_steps
from dshard.parallel.precision import Precision

__all__ = [
    "Auto",
    "ColwiseParallel",
    "Cost",
    "FunctionPlan",
    "Memory",
    "ModelPlan",
    "Moves",
    "ParallelStyle",
    "PlanTable",
    "Precision",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RankedPlan",
    "RowwiseParallel",
    "SequenceParallel",
    "batches",
    "checkpoint",
    "data_ranks",
    "distribute_batch",
    "from_pretrained",
    "loss_parallel",
    "parallelize",
    "parallelize_module",
    "plan_function",
    "plan_model",
    "plan_steps",
    "plan_table",
    "register_experts",
]

AFTER_PARALLELIZE.append(wrap_for_huggingface)
RECOGNISED["_is_expert_parallel"] = transformers_experts
