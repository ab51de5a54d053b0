"""`torch.compile` of what `parallelize` made, each block or the whole model, as one graph: equal to one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dshard import (
    CompileError,
    DTensor,
    Mesh,
    Replicate,
    Shard,
    distribute_batch,
    distribute_tensor,
    init_device_mesh,
    parallelize,
)
from dshard.core import plain_tensors
from dshard.ops.matmul.options import NO_OPTIONS, current_options
from dshard.parallel import loss_parallel
from dshard.testing import RankPool
from dshard.torch_dtensor import IS_TORCHS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not IS_TORCHS, reason="torch.compile of DTensors needs torch 2.12"),
]
WORDS = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """It makes positions, a mask and a first token on its way, which are plain tensors."""

    def __init__(self, width: int = 32, layers: int = 2, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(WORDS, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)
        self.breaks = breaks

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        first = torch.ones(1, 1, x.shape[2]).expand(ids.shape[0], 1, -1)
        x = torch.cat([first, x], 1)[:, :-1].view(ids.shape[0], ids.shape[1], -1)
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(self.norm(x)) * torch.ones(ids.shape[1], WORDS).triu(-2)


MESHES: dict[str, tuple[int, ...]] = {
    "data": (4,),
    "megatron": (4,),
    "fsdp": (4,),
    "megatron-sp": (4,),
    "optimus": (2, 2),
    "atp": (2, 2),
    "fsdp x megatron": (2, 2),
    "tesseract": (1, 2, 2),
    "context": (4,),
    "ulysses": (4,),
}


class Case:
    """A parallelized model and the same on one device, and their training in step."""

    def __init__(self, strategy: str, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        torch._dynamo.reset()  # which remembers sizes of other meshes
        torch._dynamo.utils.counters.clear()
        shape = MESHES[strategy]
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
        self.models = Llama(**kwargs), Llama(**kwargs)
        parallelize(self.models[0], self.mesh, strategy, numbers(8, 6))
        self.steps = [torch.optim.SGD(model.parameters(), lr=0.01) for model in self.models]

    def laid(self, x: Tensor, *placements: Any) -> Any:
        return distribute_tensor(x, self.mesh, placements or [Replicate()] * self.mesh.ndim, src_data_rank=None)

    def train(self, run: Callable[[Any], Any], given: Any, loss: Callable[[Any], Any] | None = None) -> None:
        """A step of both, whose losses, gradients and then parameters are equal."""
        model, single = self.models
        whole = given.full_tensor() if isinstance(given, DTensor) else given
        losses = [run(given), (loss or (lambda ids: single(ids).square().mean()))(whole)]
        for one, step in zip(losses, self.steps, strict=True):
            step.zero_grad()
            one.backward()
        torch.testing.assert_close(losses[0].full_tensor(), losses[1], rtol=1e-4, atol=1e-5)
        pairs = list(zip(model.parameters(), single.parameters(), strict=True))
        for p, q in pairs:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-4)
            assert p.grad.layout == p.layout
        for step in self.steps:
            step.step()
        for p, q in pairs:
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5)
        assert plain_tensors._COUNTED_AS_REPLICATED.depth == 0
        assert current_options() is NO_OPTIONS
        assert not torch.overrides._get_current_function_mode_stack()


def numbers(*shape: int) -> Tensor:
    return torch.arange(shape[0] * shape[1]).view(shape) % WORDS


def compiled(strategy: str, how: str, backend: str = "aot_eager") -> None:
    case = Case(strategy, breaks=how == "breaks")
    model: Any = case.models[0]
    plain = numbers(8, 6)
    match how:
        case "blocks":
            for block in model.blocks:
                block.compile(backend=backend, fullgraph=True)
            run = model
        case "whole":
            run = torch.compile(model, backend=backend, fullgraph=True)
        case "breaks":
            run = torch.compile(model, backend=backend)
        case _:
            run = torch.compile(lambda ids: model(ids), backend=backend, fullgraph=True)
    inputs = [plain, plain]
    if how == "distributed":
        inputs = [case.laid(plain), case.laid(plain, *[Shard(0)] * case.mesh.ndim)]
    for given in inputs:
        case.train(lambda ids: run(ids).square().mean(), given)


def compiled_within_a_loss(strategy: str, inside: bool, backend: str = "aot_eager", layers: int = 1) -> None:
    """The loss in the graph, too, along sharded classes, with the block around the call or within."""
    case = Case(strategy, layers=layers)
    model, single = case.models
    target = numbers(8, 6).add(1) % WORDS
    laid = case.laid(target)

    def loss(model: Any, ids: Any, target: Any) -> Any:
        return F.cross_entropy(model(ids).flatten(0, 1), target.flatten())

    def within(ids: Any) -> Any:
        with loss_parallel():
            return loss(model, ids, laid)

    run = torch.compile(within if inside else lambda ids: loss(model, ids, laid), backend=backend, fullgraph=True)

    def around(ids: Any) -> Any:
        with nullcontext() if inside else loss_parallel():
            return run(ids)

    for _ in range(2):
        case.train(around, numbers(8, 6), lambda ids: loss(single, ids, target))


def compiled_at_sizes(strategy: str, dynamic: bool | None, backend: str = "aot_eager") -> None:
    case = Case(strategy, layers=1)
    model: Any = case.models[0]
    run = torch.compile(lambda ids: model(ids), backend=backend, fullgraph=True, dynamic=dynamic)
    for sizes in ((8, 6), (4, 6), (12, 4), (8, 6)):
        case.train(lambda ids: run(ids).square().mean(), numbers(*sizes))


def blocks_alike() -> int:
    """How many graphs serve a model of many blocks."""
    model: Any = Case("megatron", layers=12).models[0]
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    model(numbers(8, 6)).square().mean().backward()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.thorough
def test_a_model_and_its_loss_are_one_graph(ranks: RankPool) -> None:
    ranks.run(compiled_within_a_loss, "megatron", False, "eager", 0, timeout=300.0)


@pytest.mark.thorough
def test_blocks_share_graphs(ranks: RankPool) -> None:
    """The first block's input is laid out otherwise than that of the rest."""
    assert max(ranks.run(blocks_alike, timeout=300.0)) <= 2


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["blocks", "whole", "one graph", "distributed"])
@pytest.mark.parametrize("strategy", MESHES)
def test_compiled_models_are_those_of_one_device(ranks: RankPool, strategy: str, how: str) -> None:
    ranks.run(compiled, strategy, how, timeout=300.0)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["megatron", "optimus", "fsdp"])
def test_models_whose_graph_breaks_are_those_of_one_device(ranks: RankPool, strategy: str) -> None:
    ranks.run(compiled, strategy, "breaks", timeout=300.0)


@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("strategy", ["megatron", "optimus", "fsdp"])
def test_other_sizes_are_those_of_one_device(ranks: RankPool, strategy: str, dynamic: bool | None) -> None:
    ranks.run(compiled_at_sizes, strategy, dynamic, timeout=300.0)


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("strategy", ["megatron", "optimus", "fsdp"])
def test_losses_along_classes_compile(ranks: RankPool, strategy: str, inside: bool) -> None:
    ranks.run(compiled_within_a_loss, strategy, inside, timeout=300.0)


class Masked(nn.Module):
    """Attention with a mask that the model makes of shapes alone, as models of Hugging Face do when they are traced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(ids.shape[1])
        mask = (places[:, None] >= places).expand(ids.shape[0], 1, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.head(x + self.o(out))  # type: ignore[no-any-return]


def compiled_with_a_mask() -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model, single, ids = Masked(), Masked(), numbers(8, 6)
    parallelize(model, mesh, "megatron", ids)
    out: Any = torch.compile(model, backend="aot_eager", fullgraph=True)(ids)
    out.square().mean().backward()
    expected = single(ids)
    expected.square().mean().backward()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.thorough
def test_attention_with_a_mask_that_the_model_makes_compiles(ranks: RankPool) -> None:
    ranks.run(compiled_with_a_mask, timeout=300.0)


class Several(nn.Module):
    """Its results are a loss, and others, views among them, that a loss may not depend on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        inner = self.up(x).relu()
        out = self.down(inner)
        return out.square().mean(), out, inner.t(), (inner + 1)[1:], out.sum(0).detach()


def compiled_with_unused_results(strategy: str) -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    model, single, x = Several(), Several(), torch.linspace(-1, 1, 48).view(6, 8)
    parallelize(model, mesh, strategy, x)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for used in ((0,), (2,), (3,), (1, 2)):
        for one in (run, single):
            one.zero_grad()
            results = one(x)
            torch.stack([results[i].sum() for i in used]).sum().backward()
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            grad = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(p.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_loss_may_leave_results_of_a_graph_out(ranks: RankPool, strategy: str) -> None:
    ranks.run(compiled_with_unused_results, strategy, timeout=300.0)


# -- graphs without redistributions


def exported_with_replicated_parameters() -> None:
    x = torch.randn(8, 6)
    model = parallelize(nn.Linear(6, 3), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), "data", x)
    laid_out = distribute_batch(model, x)
    for strict in (False, True):
        found = torch.export.export(model, (laid_out,), strict=strict).module()(laid_out)
        torch.testing.assert_close(found.full_tensor(), model(x).full_tensor())


def compiled_step_of_rows() -> None:
    """A whole step as one compiled function, whose plain loss breaks the graph at its backward pass."""
    torch.manual_seed(0)
    net, loaded, count = nn.Linear(6, 3).double(), torch.arange(48.0, dtype=torch.float64).sin().view(8, 6), 4
    model, mesh = copy.deepcopy(net), init_device_mesh("cpu", (count,), mesh_dim_names=("dp",))
    parallelize(model, mesh, "data", loaded, inputs="per-data-rank", outputs="plain")

    @torch.compile(backend="eager")
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()

    step(loaded.chunk(count)[torch.distributed.get_rank()])
    net(loaded).square().mean().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), net.weight.grad)


def test_a_compiled_step_may_hold_the_backward_pass_of_plain_rows(ranks: RankPool) -> None:
    ranks.run(compiled_step_of_rows)


@pytest.mark.ranks
@pytest.mark.thorough
def test_a_model_of_replicated_parameters_is_exported(ranks: RankPool) -> None:
    ranks.run(exported_with_replicated_parameters)


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.(trace|script):DeprecationWarning")
def test_graphs_that_hold_no_redistributions_are_refused_with_the_way_out(strategy: str) -> None:
    x = torch.randn(8, 6)
    model = parallelize(nn.Linear(6, 3), Mesh((4,), ("dp",)), strategy, x)
    with pytest.raises(
        CompileError, match=r"torch.jit.trace .*'(data|fsdp)'.*torch.compile\(model\) does; or .*state_dict"
    ):
        torch.jit.trace(model, x)
    for scripted in (model, nn.Sequential(copy.deepcopy(model))):
        with pytest.raises(CompileError, match=r"torch.jit.script .*'(data|fsdp)'.*full_tensor\(\)"):
            torch.jit.script(scripted)
    with pytest.raises(CompileError, match=r"torch.export .* takes distribute_batch\(model, inputs\).*full_tensor\(\)"):
        torch.export.export(model, (x,), strict=False)
    for written in (make_fx(model), partial(torch.func.linearize, model)):
        with pytest.raises(CompileError, match=r"linearize .* takes distribute_batch\(model, inputs\).*full_tensor"):
            written(x)
