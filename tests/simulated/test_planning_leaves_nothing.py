"""Planning and laying out change nothing of a model but what was asked: no value, no state, no generator."""

from __future__ import annotations

import random
import tracemalloc
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import stateful_models
from helpers.deep_comparison import difference, generators, module_variables, picture
from helpers.default_cases import one_in, one_way_each
from helpers.generated_models import Net, generated
from helpers.hugging_face import CONFIGS, language_model, prompt
from helpers.real_models import FAMILIES, batch_of, build
from helpers.stateful_models import KEEPING, SHARED
from helpers.user_models import Denoiser, Language, Recurrent, Residual
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from dshard import Mesh, Shard, parallelize, plan_model
from dshard.errors import LayoutError
from dshard.parallel.model_plan import chosen_plan
from dshard.parallel.plan_values import plan_options
from dshard.tensor import DTensor
from dshard.testing.simulated_ranks import simulated, whole

MESH = Mesh((2,), ("x",))
STRATEGIES = ("data", "fsdp", "megatron")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model of the same values, and the same states of all generators, in each call."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return build()


def generated_net(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    design = generated(seed)
    b, s, words = (design.sizes[name] for name in ("b", "s", "words"))
    return Net(design), (torch.randint(words, (b, s)),)


def state_of(model: nn.Module) -> list[Any]:
    return [picture(model), module_variables(stateful_models.__name__), generators()]


@pytest.mark.parametrize(("name", "strategy"), one_way_each([*KEEPING, *SHARED], ["fsdp", "data", "megatron", "auto"]))
def test_a_model_is_unchanged_by_planning(name: str, strategy: str) -> None:
    model = seeded((KEEPING | SHARED)[name])
    before = state_of(model)

    plan_model(model, MESH, strategy, X)

    after = state_of(model)
    assert difference(before[0], after[0]) == []
    assert difference(before[1], after[1]) == []
    assert before[2] == after[2]


USERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "language": (Language, (torch.arange(8).view(2, 4) % 5,)),
    "recurrent": (lambda: Recurrent(nn.LSTM), (torch.arange(8).view(2, 4) % 5, torch.tensor([4, 2]))),
    "residual": (lambda: Residual(nn.BatchNorm2d), (torch.randn(4, 3, 8, 8),)),
    "denoiser": (Denoiser, (torch.randn(2, 2, 8, 8), torch.tensor([0.1, 0.5]))),
}


@pytest.mark.parametrize("name", one_in(2, USERS))
def test_models_of_users_are_unchanged_by_planning(name: str) -> None:
    make, example = USERS[name]
    model = seeded(make)
    before = picture(model)

    plan_model(model, MESH, "data", *example)

    assert difference(before, picture(model)) == []


LONG: dict[str, dict[str, Any]] = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
"""Rotary positions of llama that its forward pass computes anew for longer texts."""


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.thorough) for each in ("long", *CONFIGS, *FAMILIES)]
)
def test_families_are_unchanged_by_planning(family: str) -> None:
    if family == "long":
        model, batch = language_model("llama", max_position_embeddings=4, **LONG), prompt()
    else:
        model, batch = (language_model(family), prompt()) if family in CONFIGS else (build(family), batch_of(family))
    before = picture(model)

    plan_model(model, MESH, "data", **batch)

    assert difference(before, picture(model)) == []


# -- laid out, and called


def run(model: nn.Module, x: Tensor) -> Tensor:
    """A step on `x`; its output, whole. Losses that the model keeps are part of the step's loss."""
    out = model(x)
    losses = getattr(model, "losses", [])
    loss = out.square().mean() + sum(losses)
    loss.backward()
    losses.clear()
    return whole(out.detach()) if isinstance(out, DTensor) else out.detach()


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """The attributes of all modules, but for hooks; distributed tensors by their global values."""
    own = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "rehearsed"
    }
    return picture(own, as_plain=lambda x: whole(x.detach()) if isinstance(x, DTensor) else x)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    state = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: (whole(x.detach()) if isinstance(x, DTensor) else x.detach()).clone() for name, x in state}


NOT_BESIDE = {"OfTheClass", "References", "Generators"}
"""Models whose state two of them share, whose parameters are held elsewhere, or that simulated ranks do not run."""


@pytest.mark.parametrize(("name", "strategy"), one_way_each(sorted({*KEEPING, *SHARED} - NOT_BESIDE), STRATEGIES))
def test_a_model_has_its_values_and_behaves_as_on_one_device(name: str, strategy: str) -> None:
    alone = seeded((KEEPING | SHARED)[name])
    before, own = values_of(alone), attributes_of(alone)
    expected = [run(alone, X * k) for k in (1, 2, 3)]
    model = seeded((KEEPING | SHARED)[name])
    with simulated(MESH):
        parallelize(model, MESH, strategy, X)
        held = values_of(model)
        assert held.keys() == before.keys()
        assert all(torch.equal(x, before[key]) for key, x in held.items())
        assert difference(own, attributes_of(model)) == []

        out = [run(model, X * k) for k in (1, 2, 3)]

        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values_of(model), values_of(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", one_in(4, range(16)))
def test_generated_models_are_unchanged_by_planning(seed: int) -> None:
    model, example = generated_net(seed)
    before = state_of(model)

    plan_model(model, MESH, "data", *example)

    assert difference(before[0], picture(model)) == []


# -- with gradients in the forward pass, and from data


class Forces(nn.Module):
    """The loss of forces, the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.outer(torch.tanh(self.inner(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].square().mean()


class InnerStep(nn.Module):
    """A loss after a step of gradient descent in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean()
        weight, bias = torch.autograd.grad(loss, list(self.linear.parameters()), create_graph=True)
        return F.linear(x, self.linear.weight - 0.1 * weight, self.linear.bias - 0.1 * bias).square().mean()


class Quantile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.quantile(self.linear(x), torch.tensor([0.1, 0.5]), dim=0).sum()


class Transcribed(nn.Module):
    """The loss of a transcription, with lengths as tensors or as numbers."""

    def __init__(self, lengths: Any, reduction: str = "mean") -> None:
        super().__init__()
        self.linear, self.lengths, self.reduction = nn.Linear(8, 5), lengths, reduction

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.arange(6).view(2, 3) % 4 + 1
        return F.ctc_loss(
            self.linear(x).view(3, 2, 5).log_softmax(-1), targets, *self.lengths, reduction=self.reduction
        ).sum()


class OfNumpy(nn.Module):
    """Scaled by what numpy computes of the input, and without a meta kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(np.abs(x.detach().numpy()).max())


def averaged() -> nn.Module:
    """A model whose norm keeps plain averages, by a number that it reads from a buffer."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))


def scripted() -> nn.Module:
    """A model with a compiled module of TorchScript."""
    return nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 8))


ASKING: dict[str, Callable[[], nn.Module]] = {
    "forces": Forces,
    "inner step": InnerStep,
    "quantile": Quantile,
    "ctc": lambda: Transcribed((torch.tensor([3, 3]), torch.tensor([1, 2]))),
    "ctc of numbers": lambda: Transcribed(([3, 2], [1, 2]), "sum"),
    "averages": averaged,
    "script": scripted,
}


@pytest.mark.parametrize(("name", "strategy"), one_way_each(ASKING, STRATEGIES))
def test_models_that_ask_for_gradients_or_values_are_laid_out(name: str, strategy: str) -> None:
    alone = seeded(ASKING[name])
    expected = run(alone, X)
    model = seeded(ASKING[name])
    with simulated(MESH):
        plan_model(model, MESH, strategy, X)
        parallelize(model, MESH, strategy, X)
        out = run(model, X)

        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                assert isinstance(p.grad, DTensor)
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values_of(model), values_of(alone), rtol=1e-4, atol=1e-5)


def test_a_value_of_numpy_is_that_of_the_example() -> None:
    model = seeded(OfNumpy)

    assert plan_model(model, MESH, "megatron", X).parameters.keys() == {"linear.weight", "linear.bias"}


class IntoPlain(nn.Module):
    """A model that writes what it computes into plain tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        degree = torch.zeros(len(x)).index_add_(0, h.argmax(1) % len(x), torch.ones(len(x)))
        rows = torch.zeros(len(x), 16)
        rows[:3] = h[:3]
        out: Tensor = self.down(rows + h / (1 + degree[:, None]))
        return out


def test_writes_into_plain_tensors_are_priced() -> None:
    plan = plan_model(seeded(IntoPlain), MESH, "auto", X)

    assert plan.cost is not None


class Foreign(torch.autograd.Function):
    """What another library computes from the memory of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.data_ptr() != 0, "no memory"
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class ByPointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.down(Foreign.apply(self.up(x)))
        return out


def test_hooks_of_all_modules_keep_no_calls_of_planning() -> None:
    seen = list[str]()
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(type(module).__name__))
    try:
        plan_model(nn.Linear(8, 4), MESH, "fsdp", X)
    finally:
        hook.remove()
    assert not seen


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_auto_plans_while_anomalies_are_looked_for() -> None:
    with torch.autograd.detect_anomaly():
        assert plan_model(nn.Linear(8, 4), MESH, "auto", X).cost is not None


def test_what_needs_memory_is_traced_on_copies_of_an_example_with_data() -> None:
    model = seeded(ByPointer)
    before = picture(model)

    plan = chosen_plan(model, MESH, "megatron", plan_options(model, None, None), (X,), {})

    assert plan.parameters["up.weight"] == (Shard(0),)
    assert difference(before, picture(model)) == []
    with pytest.raises(AssertionError, match="no memory"):
        chosen_plan(model, MESH, "megatron", plan_options(model, None, None), (X.to("meta"),), {})


# -- without data


def test_only_what_had_no_data_is_initialised() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    model[0].bias = nn.Parameter(torch.empty(8, device="meta"))
    model[2] = nn.Linear(8, 4, device="meta")
    before = values_of(model)
    with simulated(MESH):
        with pytest.warns(
            UserWarning, match=r"3 parameters .* of Sequential had no data, .* by Linear.reset_parameters"
        ):
            parallelize(model, MESH, "data", X)
        held = values_of(model)

    assert all(torch.equal(held[name], x) for name, x in before.items() if not x.is_meta)
    assert all(held[name].isfinite().all() and held[name].std() > 0 for name, x in before.items() if x.is_meta)


class Initialised(nn.Module):
    """A model that initialises itself, all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4, device="meta")

    def init_weights(self) -> None:
        self.body.weight = nn.Parameter(torch.ones(8, 8))
        for p in self.parameters():
            p.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_a_model_that_initialises_all_of_itself_keeps_what_had_data() -> None:
    model = seeded(Initialised)
    body = values_of(model.body)
    with simulated(MESH):
        with pytest.warns(UserWarning, match="2 parameters .* by Initialised.init_weights"):
            parallelize(model, MESH, "fsdp", X)
        held = values_of(model)

    assert all(torch.equal(held[f"body.{name}"], x) for name, x in body.items())
    assert held["head.weight"].eq(0.5).all()


def test_a_lazy_module_that_never_ran_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyBatchNorm1d())
    with pytest.raises(
        LayoutError, match=r"Sequential has modules that never ran.*: 0, 2; run it once .*model\(\*batch"
    ):
        plan_model(model, MESH, "data", X)
    with torch.no_grad():
        model(X)

    assert plan_model(model, MESH, "data", X).cost is not None


# -- what a model may refer to


class OfTwo(tuple[Any, ...]):
    """A tuple that is made of two values."""

    def __new__(cls, first: Any, second: Any) -> OfTwo:
        return tuple.__new__(cls, (first, second))


class Answering:
    """An object that answers by errors, for its class and for what it lacks."""

    __slots__ = ("given",)
    __class__ = property(lambda self: 1 / 0)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def dead_proxy() -> Any:
    return weakref.proxy(nn.Linear(1, 1))


@pytest.mark.filterwarnings("ignore:.*[nN]ested tensors|.*quantize")
@pytest.mark.parametrize(
    "make",
    [
        *(dead_proxy, Answering, lambda: OfTwo(torch.randn(3), 2), lambda: torch.max(torch.randn(3, 3), 0)),
        lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    ],
    ids=["dead proxy", "errors", "tuple", "result", "nested", "quantized"],
)
def test_a_model_may_refer_to_what_takes_no_stand_in(make: Callable[[], Any]) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8)))
    held = model.__dict__["held"] = make()

    assert plan_model(model, MESH, "data", X).cost is not None
    assert model.__dict__["held"] is held


class Buffered(nn.Module):
    """A model that writes to arrays of bytes and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bytes, self.numbers = nn.Linear(8, 8), bytearray(b"ab"), array("d", [1.0])

    def forward(self, x: Tensor) -> Tensor:
        self.bytes.append(1)
        self.numbers.append(2.0)
        return self.linear(x)


def test_arrays_are_put_back_and_files_are_not_read(tmp_path: Path) -> None:
    model = seeded(Buffered)
    size = 1 << 28
    model.__dict__["file"] = np.memmap(tmp_path / "data", np.uint8, "w+", shape=(size,))
    tracemalloc.start()

    plan_model(model, MESH, "data", X)

    assert (model.bytes, model.numbers) == (bytearray(b"ab"), array("d", [1.0]))
    assert tracemalloc.get_traced_memory()[1] < size
    tracemalloc.stop()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class ParametrizedWhileItRuns(nn.Linear):
    """A layer whose weight is parametrized within its forward pass alone, as adapters of peft do it."""

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self, "weight", Doubled())
        out = super().forward(x)
        parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_module_may_parametrize_its_weights_while_it_runs(strategy: str) -> None:
    alone, model = (seeded(lambda: nn.Sequential(ParametrizedWhileItRuns(8, 8), nn.ReLU())) for _ in range(2))
    with simulated(MESH):
        parallelize(model, MESH, strategy, X)
        for net in (alone, model, alone, model):
            net(X).square().sum().backward()

        assert {*model.state_dict()} == {*alone.state_dict()}
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(p.grad, DTensor)
            torch.testing.assert_close(whole(p.grad), q.grad)
