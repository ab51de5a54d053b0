"""Pipelines: schedules as values, a simulator that prices them, and stages that run on meshes of their own.

Design: docs/design/0010-pipeline.md
"""

from dshard.pipeline.costs import Costs, EdgeCost, StageCost, uniform
from dshard.pipeline.pipeline import Pipeline
from dshard.pipeline.program import (
    SCHEDULES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Program,
    Receive,
    Send,
    chain,
    computes,
    edges_of,
    lead_of,
)
from dshard.pipeline.simulator import Choice, Crossing, Span, Timeline, choose, play, rank_schedules, simulate
from dshard.pipeline.stage import Part, Stage, split

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Choice",
    "Compute",
    "Costs",
    "Crossing",
    "Edge",
    "EdgeCost",
    "Forward",
    "Part",
    "Pipeline",
    "Program",
    "Receive",
    "Send",
    "Span",
    "Stage",
    "StageCost",
    "Timeline",
    "chain",
    "choose",
    "computes",
    "edges_of",
    "lead_of",
    "play",
    "rank_schedules",
    "simulate",
    "split",
    "uniform",
]
