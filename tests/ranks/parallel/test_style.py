"""torch's styles of laying out modules: same names, same meaning, same results."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as their_tensor
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel as theirs
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn

import dshard
import dshard.debug
import dshard.parallel as ours
from dshard import DTensor, Mesh, Replicate, Shard, init_device_mesh, trace
from dshard.errors import ArgumentError, LayoutError, MeshError, MixedError, ShapeError
from dshard.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from dshard.testing import RankPool, simulated, whole
from dshard.torch_dtensor import IS_TORCHS

EXAMPLE = Path(__file__).parents[3] / "examples" / "tensor_parallel.py"
LINE = Mesh((4,), ("tp",))
WAIT = 300.0
"""Seconds that the ranks get where torch, making its first optimizer, imports half of itself."""


# -- the program of torch's tutorial


def losses_of(source: str) -> tuple[list[float], list[float]]:
    """The losses of the example on this rank's mesh, and on one device, in double precision."""
    example: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "example", "exec"), example)
    mesh = example["init_device_mesh"]("cpu", (4,))
    torch.set_default_dtype(torch.float64)
    try:
        return example["train"](mesh, steps=3), example["train"](steps=3)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.ranks
@pytest.mark.thorough
def test_the_tutorial_trains_as_with_torch_when_its_imports_alone_change(ranks: RankPool) -> None:
    source = EXAMPLE.read_text()
    for_torch = source.replace("from dshard.parallel import", "from torch.distributed.tensor.parallel import")
    for_torch = for_torch.replace("from dshard import", "from torch.distributed.tensor import")
    changed = [a for a, b in zip(source.splitlines(), for_torch.splitlines(), strict=True) if a != b]

    mine, other = (ranks.run(losses_of, text, timeout=WAIT) for text in (source, for_torch))

    assert len(changed) == 3
    assert all(line.startswith("from dshard") for line in changed)
    for (parallel, alone), (reference, _) in zip(mine, other, strict=True):
        assert parallel == pytest.approx(alone, rel=1e-12)
        assert parallel == pytest.approx(reference, rel=1e-12)
        assert parallel == mine[0][0]


# -- each style against torch's own


class Net(nn.Module):
    def __init__(self, features: int = 12) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 8), nn.LayerNorm(8)  # more rows than tokens, else they are gathered
        self.up, self.down = nn.Linear(8, features), nn.Linear(features, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.norm(self.embed(tokens))).relu())


Plan = Callable[[Any, Any], dict[str, Any]]


def megatron(parallel: Any, tensor: Any) -> dict[str, Any]:
    return {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}


def sequence(parallel: Any, tensor: Any) -> dict[str, Any]:
    shard, whole_ = tensor.Shard, tensor.Replicate
    return {
        "embed": parallel.RowwiseParallel(input_layouts=whole_(), output_layouts=shard(1)),
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=shard(1)),
        "down": parallel.RowwiseParallel(output_layouts=shard(1), use_local_output=False),
    }


def prepared(parallel: Any, tensor: Any) -> dict[str, Any]:
    shard, whole_ = tensor.Shard, tensor.Replicate
    return {
        "embed": parallel.ColwiseParallel(output_layouts=whole_()),
        "u*": parallel.ColwiseParallel(use_local_output=False),
        "down": parallel.RowwiseParallel(use_local_output=False),
        "": parallel.PrepareModuleOutput(output_layouts=whole_(), desired_output_layouts=shard(0)),
    }


PLANS: dict[str, Plan] = {"megatron": megatron, "sequence": sequence, "prepared": prepared}


@functools.cache
def mesh_of_four() -> Any:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def outputs_and_gradients(
    name: str, library: str
) -> tuple[Tensor, bool, dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Of `Net` laid out by a plan: what it returns on this rank, whether that is plain, gradients, local shapes."""
    torch.manual_seed(0)
    net, tokens = Net().double(), torch.arange(8).view(4, 2) % 10
    tokens = torch.cat([tokens, tokens], dim=1)
    parallel, tensor = (ours, dshard) if library == "dshard" else (theirs, their_tensor)
    if PLANS[name] is prepared:
        net.norm = nn.Identity()
    laid = parallel.parallelize_module(net, mesh_of_four(), PLANS[name](parallel, tensor))
    out = laid(tokens)
    (out.full_tensor() if hasattr(out, "full_tensor") else out).square().sum().backward()
    plain = not hasattr(out, "full_tensor")
    gradients = {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in laid.named_parameters()
    }
    shapes = {n: tuple(p.to_local().shape) for n, p in laid.named_parameters() if hasattr(p, "to_local")}
    return (out if plain else out.to_local()).detach(), plain, gradients, shapes


@pytest.mark.ranks
@pytest.mark.parametrize("name", one_in(3, PLANS))
def test_a_plan_gives_what_it_gives_in_torch(name: str, ranks: RankPool) -> None:
    mine, other = ranks.run(outputs_and_gradients, name, "dshard"), ranks.run(outputs_and_gradients, name, "torch")

    for ours_, theirs_ in zip(mine, other, strict=True):
        torch.testing.assert_close(ours_[0], theirs_[0], rtol=1e-12, atol=1e-12)
        assert ours_[1] == theirs_[1]
        assert ours_[3] == theirs_[3]
        assert ours_[2].keys() == theirs_[2].keys()
        for parameter, gradient in ours_[2].items():
            torch.testing.assert_close(gradient, theirs_[2][parameter], rtol=1e-12, atol=1e-12, msg=parameter)


# -- what they send, and compiled


def prepared_alone(parallel: Any, tensor: Any) -> dict[str, Any]:
    shard, whole_ = tensor.Shard, tensor.Replicate
    return {
        "up": parallel.PrepareModuleInput(
            input_layouts=shard(1), desired_input_layouts=whole_(), use_local_output=True
        ),
        "down": parallel.PrepareModuleOutput(output_layouts=whole_(), desired_output_layouts=shard(1)),
        "embed": parallel.RowwiseParallel(input_layouts=whole_(), output_layouts=shard(1)),
        "norm": parallel.SequenceParallel(use_local_output=True),
    }


def classes_sharded(parallel: Any, tensor: Any) -> dict[str, Any]:
    return {"down": parallel.ColwiseParallel(use_local_output=False)}


STYLES: dict[str, Plan] = PLANS | {"prepared_alone": prepared_alone, "classes_sharded": classes_sharded}


def step_of(name: str, parallel: Any, tensor: Any, backend: str | None) -> tuple[Any, ...]:
    """Loss, collectives forward and backward, and gradients of a step of `Net`; compiled without collectives."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, tokens = Net().double(), torch.arange(32).view(4, 8) % 10
    if STYLES[name] is prepared:
        net.norm = nn.Identity()
    net = parallel.parallelize_module(net, mesh_of_four(), STYLES[name](parallel, tensor))
    run = net if backend is None else torch.compile(net, backend=backend, fullgraph=True)
    counting: Any = tensor.debug.CommDebugMode  # in which torch compiles nothing
    counted: Any = counting if backend is None else nullcontext
    with parallel.loss_parallel() if name == "classes_sharded" else nullcontext():
        with counted() as forward:
            out = run(tokens)
            loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten() % 8) if name == "classes_sharded" else None
        loss = out.square().sum() if loss is None else loss
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        with counted() as backward:
            loss.backward()
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
    sent = [] if backend is not None else [{**mode.get_comm_counts()} for mode in (forward, backward)]
    return loss.detach(), sent, gradients


def compared_steps(names: tuple[str, ...], backend: str | None) -> None:
    for name in names:
        mine = step_of(name, ours, dshard, backend)
        other = step_of(name, theirs, their_tensor, None)
        if name in ("sequence", "prepared_alone"):  # weight and bias of the norm, which torch leaves to the optimizer
            for sent in mine[1][1:]:
                assert sent.pop(torch.ops.c10d_functional.all_reduce) == 1
        assert backend is not None or mine[1] == other[1], name
        torch.testing.assert_close((mine[0], mine[2]), (other[0], other[2]), rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.ranks
def test_styles_send_what_they_send_in_torch(ranks: RankPool) -> None:
    ranks.run(compared_steps, tuple(STYLES), None)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.skipif(not IS_TORCHS, reason="torch.compile of DTensors needs torch 2.12")
def test_styled_blocks_compile_into_one_graph(ranks: RankPool) -> None:
    ranks.run(compared_steps, ("sequence",), "eager", timeout=WAIT)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_all_styled_blocks_compile_into_one_graph(ranks: RankPool, backend: str) -> None:
    names = tuple(name for name in STYLES if name != "classes_sharded")
    ranks.run(compared_steps, names, backend, timeout=WAIT)


@pytest.mark.parametrize("features", [12, 10, 3])
def test_uneven_and_empty_shards_work(features: int) -> None:
    """Plain parts between modules count as even, so an uneven sequence stays distributed."""
    torch.manual_seed(0)
    net, tokens = Net(features).double(), torch.arange(6).view(2, 3)
    alone = copy.deepcopy(net)
    expected = alone(tokens)
    expected.sum().backward()

    with simulated(LINE):
        plan = sequence(ours, dshard)
        plan["embed"].use_local_output = False
        out = parallelize_module(net, LINE, plan)(tokens)
        out.sum().backward()

        assert isinstance(out, DTensor)
        torch.testing.assert_close(whole(out.detach()), expected.detach(), rtol=1e-12, atol=1e-12)
        for mine, reference in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), reference.grad, rtol=1e-12, atol=1e-12)


def test_inputs_after_the_first_pass_a_style_unchanged() -> None:
    class Scaled(nn.LayerNorm):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    with simulated(LINE):
        net, x = Scaled(4), torch.randn(2, 8, 4)
        expected = net(x, 3.0).detach()
        laid = dshard.distribute_tensor(x, LINE, [Shard(1)])
        out = parallelize_module(net, LINE, SequenceParallel())(laid, 3.0)

        torch.testing.assert_close(whole(out.detach()), expected)


def test_megatron_moves_one_sum_forward_and_one_backward() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    with simulated(LINE):
        parallelize_module(net, LINE, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.randn(32, 64).requires_grad_()
        with trace() as forward:
            out = net(x)
        with trace() as backward:
            out.sum().backward()

    assert [event.collective for event in forward.events] == ["all_reduce"]
    assert [event.collective for event in backward.events] == ["all_reduce"]


# -- plans


def test_a_plan_finds_modules_by_pattern_and_warns_of_names_that_nothing_has() -> None:
    net = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), "head": nn.Linear(4, 4)})
    with simulated(LINE):
        with pytest.warns(UserWarning, match="'layers.9' names no submodule of ModuleDict and does nothing"):
            parallelize_module(net, LINE, {"layers.*": ColwiseParallel(), "layers.9": RowwiseParallel()})

        assert all(layer.weight.placements == (Shard(0),) for layer in net["layers"])
        assert not isinstance(net["head"].weight, DTensor)
        with pytest.warns(
            UserWarning, match="No parallelize_plan is provided: parallelize_module leaves the module as it is"
        ):
            parallelize_module(net, LINE)


def test_a_style_of_ones_own_is_applied() -> None:
    class Frozen(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return module.requires_grad_(False)

    with simulated(LINE), warnings.catch_warnings():
        warnings.simplefilter("error")
        net = parallelize_module(nn.Linear(4, 4), LINE, Frozen(), src_data_rank=None)

    assert not net.weight.requires_grad


def test_several_inputs_and_keywords_are_prepared() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None, *, bias: Tensor, scale: float) -> tuple[Tensor, float]:
            assert isinstance(x, DTensor)
            assert y is None
            assert bias.placements == (Replicate(),)
            return (x + bias) * scale, scale

    with simulated(LINE):
        style = PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"bias": Shard(0)},
            desired_input_kwarg_layouts={"bias": Replicate()},
            output_layouts=(Replicate(), None),
            desired_output_layouts=(Shard(1), None),
            use_local_output=False,
        )
        add = parallelize_module(Add(), LINE, style)
        out, scale = add(torch.ones(2, 3), None, bias=torch.ones(2, 1), scale=3.0)

        assert scale == 3.0
        assert out.placements == (Shard(1),)
        assert torch.equal(whole(out), torch.full((8, 3), 6.0))


# -- errors


def test_errors_say_what_to_do() -> None:
    grid = Mesh((2, 2), ("dp", "tp"))
    with (
        simulated(grid),
        pytest.raises(LayoutError, match=r"one mesh axis, and \(dp=2 tp=2\) has 2: give one of them, such as mesh"),
    ):
        parallelize_module(nn.Linear(4, 4), grid, ColwiseParallel())
    with simulated(LINE):
        with pytest.raises(NotImplementedError, match=r"lays out nn\.Linear and nn\.Embedding, not Conv1d"):
            parallelize_module(nn.Conv1d(2, 2, 1), LINE, ColwiseParallel())
        with pytest.raises(LayoutError, match=r"parallelize_plan\['a'\] is 'colwise': give a ParallelStyle"):
            parallelize_module(nn.Linear(4, 4), LINE, {"a": "colwise"})
        with pytest.raises(ArgumentError, match="parallelize_plan is str: give a ParallelStyle"):
            parallelize_module(nn.Linear(4, 4), LINE, "colwise")
        with pytest.raises(LayoutError, match="should have same length! They have 2 and 1 layouts"):
            PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
        with pytest.raises(LayoutError, match="should have same length! They have 1 and 2 layouts"):
            PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Replicate(), None))
        style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        with pytest.raises(ShapeError, match="should have same length! They are 2 and 1: give one for each"):
            parallelize_module(nn.Bilinear(2, 2, 2), LINE, style)(torch.ones(1, 2), torch.ones(1, 2))
        with pytest.raises(MixedError, match="must be a tensor, got str"):
            parallelize_module(nn.Linear(4, 4), LINE, ColwiseParallel())("text")
        with pytest.raises(MeshError, match="no mesh was given: pass a DeviceMesh, or call within `with mesh:`"):
            parallelize_module(nn.Linear(4, 4), None, ColwiseParallel())


def test_styles_show_what_they_say() -> None:
    assert repr(SequenceParallel(sequence_dim=0)) == "SequenceParallel(sequence_dim=0, use_local_output=False)"
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1),), use_local_output=True)"
    )
    assert "use_local_input=False" in repr(
        PrepareModuleInputOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    )


def test_all_of_torchs_names_are_here() -> None:
    for name in theirs.__all__:
        mine, reference = getattr(ours, name), getattr(theirs, name)
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(reference).parameters)
