"""The model of the demo, and its plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard import Mesh
from dshard.comm import plain
from dshard.parallel import ModelPlan, plan_model
from dshard.tools.demo.vit import build as build_demo


@plain()
def images() -> Tensor:
    return torch.randn(6, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def demo_plan(strategy: Any, mesh: Mesh) -> ModelPlan:
    return plan_model(build_demo(0), mesh, strategy, images().float())
