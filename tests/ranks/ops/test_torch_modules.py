"""Each module of torch.nn on torch's own samples, in random layouts: values, gradients of two orders and buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.testing._internal.common_modules import module_db

from dshard import DTensor, Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from dshard.core.trees import replace_tensors, tensors_in
from dshard.testing import RankPool, rank_pool

MESHES = (4,), (2, 2)
BY_DEFAULT = 5
"""Each fifth module is tested by default, and those that were once wrong."""
ONCE_WRONG = {"nn.MultiLabelMarginLoss", "nn.MultiheadAttention", "nn.TransformerEncoderLayer"}
NAMES = [info.name for info in module_db]
KNOWN_SHAPES = ("nn.MultiLabelMarginLoss",)
"""Modules whose samples all run by default: of some, torch's form for meta tensors gives another shape."""


MAKE_PLAIN = ("nn.RNN", "nn.GRU", "nn.LSTM")
"""Modules that make a first state of their own, a plain tensor."""


class Sample(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def samples(name: str, training: bool, most: int | None) -> Iterator[Sample]:
    """torch's samples of a module, in double precision, but those that draw random numbers or whose sizes are open."""
    (info,) = (info for info in module_db if info.name == name)
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
    for given in list(inputs)[:most]:
        if given.forward_input is None:
            continue
        made = given.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).double().train(training)
        random = training and any(getattr(m, "p", 0) or getattr(m, "dropout", 0) for m in module.modules())
        if random or any(isinstance(p, UninitializedTensorMixin) for p in module.parameters()):
            continue
        args, kwargs = replace_tensors((given.forward_input.args, given.forward_input.kwargs), _alone)
        yield Sample(module, args, kwargs)


def _alone(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def results(sample: Sample, second: bool) -> dict[str, list[Any]]:
    """What a sample gives, the gradients of a loss of it, those of their squares if `second`, and the buffers."""
    torch.manual_seed(3)
    module, args, kwargs = sample
    out = [x for x in tensors_in(module(*args, **kwargs)) if x.is_floating_point()]
    leaves = [x for x in (*tensors_in((args, kwargs)), *module.parameters()) if x.requires_grad]
    recorded = [x for x in out if x.requires_grad]
    gradients: list[Any] = []
    of_gradients: list[Any] = []
    if recorded and leaves:
        total: Any = sum((x.sin() * 1.5).sum() for x in recorded)
        gradients += torch.autograd.grad(total, leaves, allow_unused=True, create_graph=second)
        squares = [(g * g).sum() for g in gradients if g is not None and g.requires_grad]
        if squares:
            try:
                of_gradients += torch.autograd.grad(sum(squares), leaves, allow_unused=True)
            except RuntimeError:  # torch has no second derivative of some
                of_gradients.append("refused")
    return {"values": out, "gradients": gradients, "second": of_gradients, "buffers": [*module.buffers()]}


def distributed(sample: Sample, mesh: Any, draw: Random) -> Sample:
    """A sample in random layouts; buffers are replicated."""

    def place(x: Tensor, split: float = 0.6) -> Any:
        placements = [
            Shard(draw.randrange(x.dim())) if x.dim() and draw.random() < split else Replicate()
            for _ in range(mesh.ndim)
        ]
        return distribute_tensor(x.detach(), mesh, placements, src_data_rank=None).requires_grad_(x.requires_grad)

    module = copy.deepcopy(sample.module)
    for part in module.modules():
        for name, p in part._parameters.items():
            part._parameters[name] = None if p is None else nn.Parameter(place(p), p.requires_grad)
        for name, b in part._buffers.items():
            part._buffers[name] = None if b is None else place(b, 0.0)
    args, kwargs = replace_tensors((sample.args, sample.kwargs), place)
    return Sample(module, args, kwargs)


def same(found: list[Any], expected: list[Any], where: str) -> None:
    assert len(found) == len(expected), where
    for x, y in zip(found, expected, strict=True):
        if not isinstance(y, Tensor):
            assert x == y, where
            continue
        whole = x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()
        torch.testing.assert_close(
            whole, y.detach(), rtol=1e-8, atol=1e-9, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )


def compare(names: list[str], shape: tuple[int, ...], seeds: int, training: bool, most: int | None) -> int:
    """Each sample twice, the second time warm and with second derivatives; returns how many."""
    n, mesh = 0, init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    for name in names:
        for k, single in enumerate(samples(name, training, None if name in KNOWN_SHAPES else most)):
            for seed in range(seeds):
                laid, alone = distributed(single, mesh, Random(f"{name} {k} {seed}")), copy.deepcopy(single)
                for second in (False, True):
                    with implicit_replication() if name in MAKE_PLAIN else nullcontext():
                        found = results(laid, second)
                    expected = results(alone, second)
                    for what, values in expected.items():
                        same(found[what], values, f"{name}, sample {k}, seed {seed}, {shape}: {what}")
                n += 1
    return n


@pytest.mark.thorough
def test_modules_equal_their_single_device_selves():
    """On two ranks, each of which takes longer to import torch's samples than to compare them."""
    names = sorted({*NAMES[::BY_DEFAULT], *ONCE_WRONG})

    assert min(rank_pool(2).run(compare, names, (2,), 1, True, 1)) > len(names) / 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_all_samples_of_modules_equal_their_single_device_selves(ranks: RankPool, name: str):
    for shape in MESHES:
        for training in (True, False):
            ranks.run(compare, [name], shape, 2, training, None, timeout=1200.0)
