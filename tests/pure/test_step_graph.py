"""The graph of a traced step: run as a program it is the model, and its rules fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.expert_models import OwnModel
from helpers.transformer_blocks import BLOCKS, GPT, TOKENS, WIDTH
from helpers.user_models import Language, LowRank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dshard.parallel import register_experts
from dshard.parallel.trace_step import record_step
from dshard.planning.step_graph import GraphCall, StepGraph, Value
from dshard.rules.rule import factor_sizes
from dshard.trace import common_module


class Words(nn.Module):
    """Blocks between an embedding and a head, whose weights may be one, and the loss."""

    def __init__(self, block: str = "gpt", layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(12, WIDTH), nn.ModuleList(BLOCKS[block]() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Attending(nn.Module):
    """Two stacks: the second attends to the first, by matmuls and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GPT(), GPT()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.first(x), self.second(y)
        scores = torch.einsum("bqd,bkd->bqk", self.q(y), self.k(x)).softmax(-1)
        return y + scores @ self.v(x)


class Writing(nn.Module):
    """Writes in place: to a whole tensor, to a part of a new one, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.up(x), inplace=True)
        y.mul_(2)
        z = y.new_zeros(y.shape)
        z[:, 0] = y[:, 1]
        whole = y + 1
        whole.view(-1).add_(1)
        return z + whole * y


class Doubled(torch.autograd.Function):
    """Twice the sine, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0].cos()


class Recomputing(nn.Module):
    """A checkpointed block, a function with a backward pass of its own, and a teacher without gradients."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.use_reentrant = GPT(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = Doubled.apply(checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant))
        with torch.no_grad():
            target = self.teacher(x)
        return y * target


def activations() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(12, (2, TOKENS)), torch.randint(12, (2, TOKENS))


def adapters() -> nn.Module:
    return nn.Sequential(*(LowRank(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))


CASES: dict[str, tuple[Any, Any]] = {
    "gpt": (Words, words),
    "llama": (lambda: Words("llama"), words),
    "vit": (lambda: Words("vit", tied=True), words),
    "two stacks": (Attending, lambda: (activations(), activations())),
    "adapters": (adapters, lambda: (activations(),)),
    "in place": (Writing, lambda: (activations(),)),
    "checkpoint": (lambda: Recomputing(False), lambda: (activations(),)),
    "reentrant checkpoint": (lambda: Recomputing(True), lambda: (activations(),)),
    "constants": (Language, lambda: words()[:1]),
}


def traced(name: str) -> tuple[nn.Module, tuple[Tensor, ...], StepGraph]:
    make, batch = CASES[name]
    torch.manual_seed(0)
    model, args = make().double(), batch()
    return model, args, record_step(model, args, {}).graph()


def computed(graph: StepGraph, model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    """The first result of the graph run as a program."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = iter(args)
    known: dict[Value, Tensor] = {}
    for value in graph.values:
        if value.kind in ("parameter", "buffer"):
            known[value] = state[value.name]
        elif value.kind == "input":
            known[value] = next(inputs)
        elif value.kind == "constant":
            known[value] = torch.zeros(value.shape, dtype=value.dtype)  # in "in place" those are new zeros
    for call in graph.calls:
        out = call.run(*(known[x] for x in call.operands))
        for value, x in zip(call.results, [out] if isinstance(out, Tensor) else out, strict=True):
            known[value] = x if value.needs_grad else x.detach()
    return known[graph.outputs[0]]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("constants", "in place")])
@pytest.mark.parametrize("copies", [False, True])
def test_the_graph_run_as_a_program_is_the_model(name: str, copies: bool) -> None:
    model, args, graph = traced(name)
    graph = graph.copies() if copies else graph

    out, expected = computed(graph, model, args), model(*args)
    assert torch.equal(out, expected)
    for (name, own), other in zip(gradients(model, out).items(), gradients(model, expected).values(), strict=True):
        assert own is other is None or torch.allclose(own, other, rtol=0, atol=1e-12), name


def gradients(model: nn.Module, out: Tensor) -> dict[str, Any]:
    model.zero_grad()
    out.sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def fits(call: GraphCall) -> None:
    """Check that the rules of a call are of its operands and results, and that its function makes these results."""
    tensors = (*call.operands, *call.results)
    for rule in (call.rule, *(rule for _, rule in call.alternatives)):
        terms = (*rule.inputs, *rule.outputs)
        assert [len(term) for term in terms] == [len(x.shape) for x in tensors]
        factor_sizes(terms, [x.shape for x in tensors], rule)
    out = call.run(*(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in call.operands))
    results = [out] if isinstance(out, Tensor) else list(out)
    assert [(tuple(x.shape), x.dtype) for x in results] == [(x.shape, x.dtype) for x in call.results]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("copies", [False, True])
def test_each_value_is_made_before_it_is_read_and_each_rule_fits(name: str, copies: bool) -> None:
    _, _, graph = traced(name)
    graph = graph.copies() if copies else graph

    for i, value in enumerate(graph.values):
        assert value.number == i
        assert value.producer is None or value.kind == "made"
        assert all(graph.calls[call].operands[position] is value for call, position in value.uses)
    for i, call in enumerate(graph.calls):
        assert call.number == i
        assert all(x.producer is None or x.producer.call < i for x in call.operands)
        assert any(x.kind != "constant" for x in call.operands)
        fits(call)
    assert all(call.within >= 0 for call in graph.calls if call.name not in ("copy", "write to a view"))
    places = Counter((each.module, each.visit, each.name, each.ordinal) for each in graph.functions)
    assert {*places.values()} == {1}


def test_functions_that_are_planned_as_one_operator_are_one_call() -> None:
    names = Counter(call.name for call in traced("llama")[2].calls)

    assert names["linear"] == 3 * 7 + 1
    assert names["rms_norm"] == 3 * 2
    assert names["scaled_dot_product_attention"] == 3
    assert names["cross_entropy"] == names["embedding"] == 1
    assert not {"t", "mm", "addmm", "bmm", "_softmax", "_log_softmax", "rsqrt", "nll_loss_forward"} & names.keys()


def test_other_ways_to_run_a_call_come_with_their_rules() -> None:
    by_name = {call.name: dict(call.alternatives) for call in traced("llama")[2].calls}

    attention = by_name["scaled_dot_product_attention"]
    assert "k" not in attention["split keys"].unsharded
    assert attention["heads of queries"].inputs[1][1] == ()
    assert all(not by_name[name]["small reductions"].unsharded for name in ("rms_norm", "cross_entropy"))
    softmax = next(call for call in traced("two stacks")[2].calls if call.name == "_softmax")
    assert [*dict(softmax.alternatives)] == ["small reductions"]
    assert softmax.rule.unsharded


def test_a_tied_weight_is_one_value_with_two_uses() -> None:
    model = Words(tied=True)
    graph = record_step(model, words(), {}).graph()

    (weight,) = [x for x in graph.parameters() if x.name == "embed.weight"]
    assert [graph.calls[call].module for call, _ in weight.uses] == ["embed", "head"]
    assert len(graph.parameters()) == len([*model.parameters()])


def test_one_copy_stands_between_a_tensor_and_the_calls_that_read_it() -> None:
    for name, copied in (("llama", ["q", "k", "v"]), ("adapters", ["0.base", "0"])):
        graph = traced(name)[2].copies()
        copies = [call for call in graph.calls if call.name == "copy"]
        copied_once = [x.number for call in copies for x in call.results]
        made = [x for x in graph.values if x.kind == "made" and x.shape and x.number not in copied_once]
        assert all(len(x.uses) < 2 for x in made)
        readers = [[graph.calls[end.call] for end in copy.results[0].uses] for copy in copies]
        assert copied in [[call.module.removeprefix("blocks.0.") for call in each] for each in readers]
        again = graph.copies()
        assert len(again.calls) == len(graph.calls)


def test_gradients_are_needed_where_autograd_gives_them() -> None:
    for name in ("checkpoint", "reentrant checkpoint"):
        model, _, graph = traced(name)
        needed = {call.module: call.results[0].needs_grad for call in graph.calls}
        assert needed == {module: module != "teacher" for module in needed}, name
        assert {x.name for x in graph.parameters()} == {*dict(model.named_parameters())}
    frozen = {x.name: x.needs_grad for x in traced("adapters")[2].parameters()}
    assert frozen == {name: "base" not in name for name in frozen}


@pytest.mark.parametrize("last", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True), nn.Softplus()], ids=str)
def test_all_that_leads_from_a_parameter_to_the_result_needs_a_gradient(last: nn.Module) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), last)

    graph = record_step(model, (torch.empty(8, 2, 3),), {}).graph()

    leads = {x.number for x in graph.parameters()}
    for call in graph.calls:
        leads |= {x.number for x in call.results if not leads.isdisjoint([y.number for y in call.operands])}
    read = {x.number for x in graph.outputs}
    for call in reversed(graph.calls):
        read |= {x.number for x in call.operands if not read.isdisjoint([y.number for y in call.results])}
    needed = {x.number for x in graph.values if x.needs_grad}
    assert needed == {n for n in leads & read if graph.values[n].dtype.is_floating_point}


def test_what_is_written_in_place_is_a_new_value() -> None:
    _, _, graph = traced("in place")

    for call in graph.calls:
        if call.name.endswith("_"):
            assert call.operands[0] is not call.results[0]
            assert all(end.call > call.number for end in call.results[0].uses)
    product = next(call for call in graph.calls if call.name == "mul")
    written = {graph.calls[x.producer.call].name for x in product.operands if x.producer is not None}
    assert written == {"mul_", "write to a view"}


def test_a_layer_of_experts_is_one_call() -> None:
    register_experts(type(OwnModel().experts), "e f d, e d f, e f d", counts=("count",))
    graph = record_step(OwnModel(), (torch.randn(3, 5, 8),), {}).graph()

    (experts,) = [call for call in graph.calls if call.name == "experts"]
    assert experts.module == "experts"
    assert experts.rule.chosen is not None
    assert [x.kind for x in experts.operands] == ["made"] * 3 + ["parameter"] * 3


def test_modules_that_are_run_twice_make_calls_of_two_visits() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    graph = record_step(nn.Sequential(shared, nn.ReLU(), shared), (activations().float(),), {}).graph()

    assert [(each.module, each.visit, each.ordinal, each.begun) for each in graph.functions] == [
        ("0", 0, 0, ("", "0")),
        ("1", 0, 0, ("1",)),
        ("0", 1, 0, ("0",)),
    ]


def test_the_innermost_module_of_several() -> None:
    assert [common_module(paths) for paths in (["a.b"], ["a", "a.b"], ["a.b", "a.c"], ["a", "b"], ["", "a"])] == [
        "a.b",
        "a",
        "a",
        "",
        "",
    ]
