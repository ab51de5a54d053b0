"""Copies of a parameter in several stages are trained as one: as a model in which it is one parameter."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.default_cases import one_way_each
from helpers.pipeline_models import LOSS, Where, batch, lay_out, mesh_of, parts, placements_of
from torch import nn

from dshard.errors import ScheduleError
from dshard.pipeline import Pipeline, Stage
from dshard.testing import RankPool

TWO = (Where((0, 1), (2,), "data"), Where((2, 3), (2,), "tensor"))
UNEVEN = (Where((3,), (1,), "replicated"), Where((2, 0, 1), (3,), "tensor"))
FOUR = tuple(Where((rank,), (1,), "replicated") for rank in range(4))
STEPS, RATE, LIMIT = 3, 0.1, 0.5


def names(n_stages: int) -> tuple[str, str]:
    """The embedding of the first stage, and the product with it in the last."""
    return ("0.0.words.weight", "1.1.words.weight") if n_stages == 2 else ("0.words.weight", "3.words.weight")


def named(modules: list[nn.Module], text: str) -> nn.Parameter:
    number, _, name = text.partition(".")
    return modules[int(number)].get_parameter(name)


def on_one_device(n_stages: int, accumulate: int) -> tuple[list[float], torch.Tensor]:
    """Losses and norms of gradients of some steps of descent, which are clipped, and the tied parameter after them."""
    modules = [module for module, _, _ in parts("gpt", n_stages)]
    first, second = names(n_stages)
    tied = named(modules, first)
    holder, _, key = second.partition(".")[2].rpartition(".")
    setattr(modules[int(second[0])].get_submodule(holder), key, tied)
    optimiser = torch.optim.SGD({p for module in modules for p in module.parameters()}, lr=RATE)
    x, target = batch("gpt")
    losses = []
    for _ in range(STEPS):
        for _ in range(accumulate):
            loss = LOSS["gpt"](nn.Sequential(*modules)(x), target)
            loss.backward()
        losses += [loss.item(), nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], LIMIT).item()]
        optimiser.step()
        optimiser.zero_grad()
    return losses, tied.detach()


def piped(wheres: tuple[Where, ...], accumulate: int, groups: list[tuple[str, ...]]) -> Pipeline:
    meshes = [mesh_of(where.ranks, where.shape) for where in wheres]
    stages = []
    for mesh, where, (module, takes, gives) in zip(meshes, wheres, parts("gpt", len(wheres)), strict=True):
        here = mesh.get_coordinate() is not None
        placements = dict.fromkeys([*takes, "target"], placements_of(where))
        stages.append(Stage(lay_out(module, where) if here else None, mesh, takes, gives, placements))
    return Pipeline(stages, n_microbatches=2, loss=LOSS["gpt"], tied=groups)


def on_ranks(wheres: tuple[Where, ...], accumulate: int) -> tuple[list[float], list[torch.Tensor]]:
    """The same in stages, and the copy of this rank, if it has one."""
    both = names(len(wheres))
    pipeline = piped(wheres, accumulate, [both])
    optimiser = torch.optim.SGD(pipeline.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        for _ in range(accumulate):
            loss = pipeline.step(*batch("gpt"))
        losses += [loss.item(), pipeline.clip_grad_norm_(LIMIT).item()]
        optimiser.step()
        optimiser.zero_grad()
    mine = [text.partition(".")[2] for text in both if int(text[0]) == pipeline.number]
    return losses, [pipeline.module.get_parameter(name).full_tensor().detach() for name in mine]


@pytest.mark.ranks
@pytest.mark.parametrize(("wheres", "accumulate"), one_way_each([TWO, UNEVEN, FOUR], [2, 1], every=3))
def test_copies_train_as_one_parameter(ranks: RankPool, wheres: tuple[Where, ...], accumulate: int) -> None:
    losses, tied = on_one_device(len(wheres), accumulate)

    found = ranks.run(on_ranks, wheres, accumulate)

    copies = [copy for _, held in found for copy in held]
    assert len(copies) == sum(len(where.ranks) for where in (wheres[0], wheres[-1]))
    for other, _ in found:
        torch.testing.assert_close(other, losses, atol=1e-12, rtol=0)
    for copy in copies:
        torch.testing.assert_close(copy, tied, atol=1e-12, rtol=0)
        assert torch.equal(copy, copies[0])


def refused(groups: list[tuple[str, ...]]) -> str:
    try:
        piped(TWO, 1, groups)
    except ScheduleError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("0.0.words.weight", "2.head"), r"tied='2.head': write the number of a stage, below 2, and the name"),
        (("words", "1.1.words.weight"), r"tied='words': write the number of a stage"),
        (("0.0.words.weight",), r"copies of a parameter are in different stages"),
        (("0.0.words.weight", "1.1.words.wait"), r"stage 1 has no parameter 1.words.wait; it has 0.norm.weight, "),
        (("0.0.words.weight", "1.0.q.weight"), r"have one shape and dtype, not 0.0.words.weight \(11, 8\)"),
    ],
)
def test_what_cannot_be_tied_is_refused_on_all_ranks(ranks: RankPool, group: tuple[str, ...], message: str) -> None:
    for text in ranks.run(refused, [group]):
        assert re.search(message, text), text
