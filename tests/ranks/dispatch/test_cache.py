"""What is remembered is bounded, counted and forgotten on demand; and a warm call plans nothing."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dshard
from dshard import Replicate, Shard, distribute_tensor, init_device_mesh
from dshard.caches import Cache, cache_info, cached, clear_caches, clear_records
from dshard.comm.user_code import user_call
from dshard.core.context import MAX_TOPOLOGIES, planning_context, planning_context_of
from dshard.core.observe import observing
from dshard.testing import RankPool
from dshard.topology import Topology
from dshard.torch_private import no_torch_function


def test_a_cache_forgets_its_oldest_entry_beyond_its_bound() -> None:
    found = Cache("three", bound=3)

    for i in range(5):
        found.add(i, str(i))

    assert list(found) == [2, 3, 4]
    assert cache_info()["three"] == (3, 0, 5, 3)


def test_functions_are_remembered_up_to_their_bound() -> None:
    calls = []

    @cached("one of two", 2)
    def double(x: int) -> int:
        calls.append(x)
        return 2 * x

    assert [double(x) for x in (1, 2, 2, 3, 1)] == [2, 4, 4, 6, 2]
    assert calls == [1, 2, 3, 1]
    assert cache_info()["one of two"] == (2, 1, 4, 2)


def test_no_cache_is_without_a_bound() -> None:
    for name, found in dshard.cache_info().items():
        assert 0 < found.bound <= 65536 * (MAX_TOPOLOGIES + 2), name
        assert found.entries <= found.bound, name


def test_layers_have_few_caches() -> None:
    for module in pkgutil.walk_packages(dshard.__path__, "dshard."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    # The cache of a runtime is there once a mesh of processes was made.
    given = {*dshard.cache_info(), "runners"} - {"three", "one of two", "squares"}

    assert len(given) <= 40, given


def test_what_was_decided_on_many_topologies_is_forgotten_but_for_the_last() -> None:
    kept = [planning_context_of(Topology.flat(bandwidth=1e9 + i)) for i in range(MAX_TOPOLOGIES + 1)]

    assert planning_context_of(kept[1].topology) is kept[1]
    assert planning_context_of(kept[0].topology) is not kept[0]
    assert planning_context_of(None) is planning_context_of(None)


@cache
def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def laid(shape: tuple[int, ...], *placements: Any, grad: bool = False) -> Any:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) / 7
    out = distribute_tensor(x, mesh(), placements, src_data_rank=None)
    return out.requires_grad_() if grad else out


def step(x: Any, w: Any, b: Any) -> Any:
    h = F.layer_norm(x, (x.shape[-1],), w)
    h = (F.linear(F.gelu(h), b) * 0.5 + 1).softmax(-1)
    return h.redistribute(mesh(), [Replicate(), Replicate()]).sum(0)


def operands(grad: bool) -> list[Any]:
    column = laid((6, 4), Replicate(), Shard(0), grad=grad)
    return [laid((4, 4), Shard(0), Replicate(), grad=grad), laid((4,), Replicate(), Replicate(), grad=grad), column]


def warm_and_cold() -> list[str]:
    """What is wrong with the counts of a second and a third step, and of one after all is forgotten."""
    wrong = []
    for grad in (False, True):
        given = operands(grad)
        clear_caches()
        results = []
        for turn in range(4):
            if turn == 3:
                clear_records()
                left = {name: found.entries for name, found in cache_info().items() if found.entries}
                wrong += [f"after all was forgotten: {left}"] if left else []
            before = cache_info()
            out = step(*given)
            if grad:
                out.sum().backward()
            results.append(out.full_tensor())
            after = cache_info()
            new = {name: found.misses - before[name].misses for name, found in after.items() if name in before}
            grown = {name: count for name, count in new.items() if count}
            if turn == 2 and grown:
                wrong.append(f"a warm step with grad={grad} looked up what it did not find: {grown}")
            if turn == 3 and grad and not new["gradient meshes"]:
                wrong.append("leaves remember with which gradients theirs were reduced")
            if turn == 2 and after["executors"].hits + after["choices"].hits <= 8:
                wrong.append(f"hits are not counted: {after}")
        wrong += [f"turn {i} differs" for i, found in enumerate(results) if not found.equal(results[0])]
    return wrong


@pytest.mark.ranks
def test_a_warm_step_finds_all_that_it_looks_up(ranks: RankPool) -> None:
    assert ranks.run(warm_and_cold) == [[]] * 4


def planned_once() -> list[str]:
    """Optimisers on lists, fused ones, and operators without a rule are planned once, as executables of their calls."""
    clear_caches()
    wrong = []
    names = {"foreach": "aten._foreach_sqrt.default", "fused": "aten._fused_adamw_.default"}
    for kind, name in names.items():
        parameters = [torch.nn.Parameter(laid((8, 8), Shard(dim), Replicate())) for dim in (0, 1)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **{kind: True})
        for turn in range(3):
            for parameter in parameters:
                parameter.grad = laid((8, 8), Shard(0), Replicate())
            before = cache_info()["executors"].misses
            with dshard.trace() as traced:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
            if turn == 2 and cache_info()["executors"].misses != before:
                wrong.append(f"a warm step of {kind} plans again")
        wrong += [
            f"{kind}: trace has no {each}"
            for each in (name, "aten._foreach_norm.Scalar")
            if not is_traced(traced, each)
        ]
    x = laid((8, 8), Shard(0), Replicate())
    results = [torch.histc(x, 4).full_tensor() for _ in range(2)]
    wrong += [] if torch.equal(*results) else ["a fallback gives another result when warm"]
    executors = planning_context().executors.values()
    for name in ("aten._foreach_sqrt.default", "aten.histc.default"):
        if not any(getattr(each, "decision", None) and each.decision.op == name for each in executors):
            wrong.append(f"{name} has no executable")
    return wrong


def is_traced(traced: Any, name: str) -> bool:
    return name in traced.operators or name in [event.op for event in traced.events]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_operators_on_lists_and_those_without_a_rule_are_planned_once(ranks: RankPool) -> None:
    assert ranks.run(planned_once) == [[]] * 4


@pytest.mark.parametrize("grad", [False, True])
def test_a_warm_call_that_redistributes_takes_one_look_up(grad: bool) -> None:
    mesh = dshard.Mesh((4,), ("tp",))
    x, w = (
        distribute_tensor(torch.empty(8, 8, device="meta"), mesh, [Shard(0)]).requires_grad_(grad) for _ in range(2)
    )
    heads = distribute_tensor(torch.empty(2, 3, 8, 4, device="meta"), mesh, [Shard(2)]).requires_grad_(grad)
    calls = (lambda: F.linear(x, w), lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))
    with dshard.use_strategy(attention="context"):  # a ring is several operators, planned together
        nodes = [call().grad_fn for call in calls for _ in range(2)]

        before = cache_info()
        warm = [call().grad_fn for call in calls]
        after = cache_info()

    hits = {name: after[name].hits - found.hits for name, found in before.items()}
    assert (hits["choices"], hits["executors"]) == (2, 0)
    assert [type(node) for node in warm] == [type(node) for node in nodes[::2]]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def seen_and_changed() -> list[str]:
    """Who wants to see, record or change what runs does so, though executables of the same calls are known."""
    x, y = laid((4, 6), Shard(0), Shard(1)), laid((6, 4), Shard(1), Replicate())
    calls = [lambda: x * 2, lambda: x.softmax(-1), lambda: x @ y, lambda: F.gelu(x), lambda: torch.add(x, x, alpha=2)]
    plain = [call().full_tensor() for call in calls]
    wrong = [] if dshard.cache_info()["executors"].entries else ["no executables are known"]
    again = [call().full_tensor() for call in calls]
    wrong += [f"call {i} differs" for i, (a, b) in enumerate(zip(plain, again, strict=True)) if not a.equal(b)]
    with dshard.trace() as traced:
        _ = [call() for call in calls]
    wrong += [] if len(traced.events) else ["trace sees no collective of a product"]
    with Seen() as seen:
        _ = x * 2
    wrong += [] if "mul" in seen.names else [f"a mode sees {seen.names}"]
    with dshard.use_strategy(matmul="summa-abt"):
        by_strategy = (x @ y).placements
    wrong += [] if by_strategy != (x @ y).placements else ["use_strategy has no effect on a product that is known"]
    with torch.autocast("cpu", torch.bfloat16):
        wrong += [] if (x.float() @ y.float()).dtype == torch.bfloat16 else ["autocast has no effect"]
    leaf = x.detach().requires_grad_()
    (leaf * 2).sum().backward()
    wrong += [] if leaf.grad is not None and leaf.grad.full_tensor().eq(2).all() else ["nothing is recorded"]
    wrong += [] if (x * 3).full_tensor().equal(plain[0] * 1.5) else ["a number that was seen before is used again"]
    view = x.view(-1, 3)
    view.add_(1)
    wrong += [] if (x * 2).full_tensor().equal(plain[0] + 2) else ["a view lost its base"]
    return wrong


@pytest.mark.ranks
def test_known_calls_hide_nothing(ranks: RankPool) -> None:
    assert ranks.run(seen_and_changed) == [[]] * 4


def mixed(x: Tensor) -> str:
    try:
        _ = laid((4, 4), Shard(0), Replicate()) + x
    except dshard.MixedError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.ranks
def test_a_plain_tensor_is_refused_though_the_call_is_known(ranks: RankPool) -> None:
    found = ranks.run(plain_after_distributed)
    assert all("a plain torch.Tensor of shape (4, 4) among distributed tensors" in text for text in found)


def plain_after_distributed() -> str:
    x = laid((4, 4), Shard(0), Replicate())
    _ = x + x
    _ = x + x
    return mixed(torch.ones(4, 4))


def test_an_operator_without_a_function_of_torch_around_it_is_named() -> None:
    x = distribute_tensor(torch.empty(8, 8, device="meta"), dshard.Mesh((4,), ("tp",)), [Shard(0)])
    calls: list[str] = []
    note = eval("lambda decision: calls.append(user_call())", {"calls": calls, "user_call": user_call})
    note = FunctionType(note.__code__.replace(co_filename=dshard.__file__), note.__globals__)  # a frame of dshard's
    with no_torch_function(), observing(note):
        torch.exp(x)

    assert calls[0].startswith("aten.exp.default at ")
