"""What `with` blocks change: for their own thread and task alone, taken back in any order, seen by backward passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard import (
    DTensor,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    Topology,
    explain,
    matmul,
    strict,
    trace,
    use_strategy,
    use_topology,
)
from dshard.comm import Scoped, listen, planning
from dshard.comm.runtime import runtime_of
from dshard.core.context import planning_context
from dshard.core.observe import _OBSERVERS, OBSERVERS, observing
from dshard.core.spec import for_shapes, is_for_shapes
from dshard.errors import LayoutError
from dshard.ops.matmul.options import NO_OPTIONS, MatmulOptions, current_options
from dshard.testing import distribute, simulated

MESH = Mesh((2,), ("x",))
FIRST, SECOND, THIRD = (Topology.flat(bandwidth=bandwidth) for bandwidth in (1e9, 2e9, 3e9))
BLOCKS: dict[str, Callable[[int], AbstractContextManager[object]]] = {
    "use_topology": lambda i: use_topology((FIRST, SECOND, THIRD)[i]),
    "use_strategy": lambda i: (
        use_strategy(matmul="summa"),
        use_strategy(panels=2, saved="stored"),
        use_strategy(matmul="row"),
    )[i],
}
VALUES: dict[str, Callable[[], object]] = {
    "use_topology": lambda: planning_context().topology,
    "use_strategy": current_options,
}
NAMES = pytest.mark.parametrize("name", BLOCKS)


def inside(name: str, blocks: tuple[int, ...]) -> object:
    """The value within these blocks, properly nested."""
    with ExitStack() as stack:
        for i in blocks:
            stack.enter_context(BLOCKS[name](i))
        return VALUES[name]()


@NAMES
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_blocks_may_be_left_in_any_order(name: str, order: tuple[int, ...]) -> None:
    blocks = [BLOCKS[name](i) for i in range(3)]
    for block in blocks:
        block.__enter__()
    left: list[int] = []
    for i in order:
        blocks[i].__exit__(None, None, None)
        left.append(i)

        assert VALUES[name]() == inside(name, tuple(i for i in range(3) if i not in left))


def test_what_nothing_asks_for_is_one_object() -> None:
    with use_strategy():
        assert current_options() is NO_OPTIONS
    with use_strategy(matmul="summa"), use_strategy(saved="stored"):
        assert current_options() is not NO_OPTIONS
        assert current_options() == MatmulOptions("summa", saved="stored")
    assert current_options() is NO_OPTIONS


@NAMES
def test_generators_that_take_turns_restore_what_was(name: str) -> None:
    def suspended(i: int) -> Generator[None]:
        with BLOCKS[name](i):
            yield

    before = VALUES[name]()
    first, second = suspended(0), suspended(1)
    next(first)
    next(second)
    first.close()
    assert VALUES[name]() == inside(name, (1,))
    second.close()

    assert VALUES[name]() is before


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20))
def test_the_value_is_made_of_the_blocks_that_were_not_left(steps: list[tuple[bool, int]]) -> None:
    scoped: Scoped[int, tuple[int, ...]] = Scoped("law", tuple)
    entered: list[tuple[int, Any]] = []
    for enter, i in steps:
        if enter:
            block = scoped.entered(i)
            block.__enter__()
            entered.append((i, block))
        elif entered:
            entered.pop(i % len(entered))[1].__exit__(None, None, None)
        assert scoped.value() == tuple(i for i, _ in entered)
        assert len(scoped.anywhere) == len(entered)
    for _, block in entered:
        block.__exit__(None, None, None)
    assert scoped.value() == ()


@NAMES
def test_a_block_holds_for_its_own_thread(name: str) -> None:
    outside, expected = VALUES[name](), inside(name, (1,))
    with BLOCKS[name](0), ThreadPoolExecutor(1) as threads:
        assert threads.submit(VALUES[name]).result() == outside
        block = BLOCKS[name](1)
        threads.submit(block.__enter__).result()
        assert threads.submit(VALUES[name]).result() == expected != VALUES[name]()
        threads.submit(block.__exit__, None, None, None).result()
        assert threads.submit(VALUES[name]).result() == outside


@NAMES
def test_a_block_holds_for_its_own_task(name: str) -> None:
    outside, expected = VALUES[name](), [inside(name, (i,)) for i in range(3)]

    async def task(i: int) -> None:
        for _ in range(3 - i):
            await asyncio.sleep(0)
        with BLOCKS[name](i):
            for _ in range(2 + i):
                assert VALUES[name]() == expected[i]
                await asyncio.sleep(0)
        assert VALUES[name]() == outside

    async def all_tasks() -> None:
        await asyncio.gather(*(task(i) for i in range(3)))
        with BLOCKS[name](0):
            assert await asyncio.to_thread(VALUES[name]) == expected[0]

    asyncio.run(all_tasks())


def test_trace_strict_and_explain_see_their_own_thread() -> None:
    x = torch.ones(4, 4)
    entered, go = threading.Event(), threading.Event()
    operators: list[str] = []

    def other() -> None:
        with simulated(MESH), trace() as found, strict():
            entered.set()
            go.wait(60)
            distribute(x, Layout(MESH, (Shard(0),))).cos()
        operators.extend(found.operators)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    assert OBSERVERS
    with simulated(MESH), trace() as mine:
        distribute(x, Layout(MESH, (Partial(),))).relu()  # which strict() would refuse
    with planning():
        go.set()
        thread.join()
    explain(matmul, *(distribute(x, Layout(MESH, (Replicate(),))) for _ in range(2)))

    assert mine.operators[-1] == "aten.relu.default"
    assert [event.collective for event in mine.events]
    assert operators == ["aten.cos.default"]
    assert not OBSERVERS


def test_observers_and_listeners_may_be_left_in_any_order() -> None:
    x = torch.ones(4)
    seen: dict[str, list[Any]] = {"a": [], "b": []}
    with simulated(MESH):
        p = distribute(x, Layout(MESH, (Partial(),)))
        a, b = listen(seen["a"].append), listen(seen["b"].append)
        a.__enter__()
        b.__enter__()
        a.__exit__(None, None, None)
        p.full_tensor()
        b.__exit__(None, None, None)
        p.full_tensor()
    assert [len(events) for events in seen.values()] == [0, 1]

    refuse, watch = strict(), trace()
    with simulated(MESH):
        refuse.__enter__()
        found = watch.__enter__()
        with pytest.raises(LayoutError, match=r"strict\(\) forbids"):
            p.relu()
        refuse.__exit__(None, None, None)
        p.relu()
        watch.__exit__(None, None, None)
    assert found.operators.count("aten.relu.default") >= 1


def test_what_the_library_enters_itself_is_of_one_thread() -> None:
    with simulated(MESH):
        mesh = distribute(torch.ones(2), Layout(MESH, (Shard(0),))).layout.mesh
        known = runtime_of(mesh)
    with planning(), for_shapes(), ThreadPoolExecutor(1) as threads:
        assert runtime_of(mesh) is None
        assert is_for_shapes()
        assert threads.submit(runtime_of, mesh).result() is known
        assert not threads.submit(is_for_shapes).result()


class Deep(torch.autograd.Function):
    """The identity, whose backward pass starts another one, and so on: autograd runs the deep ones on other threads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, ask: Callable[[], None]) -> torch.Tensor:
        ctx.depth, ctx.ask = depth, ask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.ask()
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.ask).backward()  # type: ignore[no-untyped-call]
        return grad, None, None


def deep(ask: Callable[[], None]) -> None:
    Deep.apply(torch.ones(1, requires_grad=True), 70, ask).backward()  # type: ignore[no-untyped-call]


def test_threads_of_autograd_see_what_the_caller_of_backward_does() -> None:
    seen: set[tuple[bool, object, object, int]] = set()
    main = threading.get_ident()

    def ask() -> None:
        with use_strategy(saved="stored"):
            inner = current_options()
        assert inner.saved == "stored"
        assert inner.strategy == current_options().strategy
        seen.add(
            (
                threading.get_ident() == main,
                planning_context().topology,
                current_options().strategy,
                len(_OBSERVERS.value()),
            )
        )

    with use_topology(FIRST), use_strategy(matmul="row"), observing(lambda decision: None):
        deep(ask)
    assert seen == {(mine, FIRST, "row", 1) for mine in (True, False)}

    seen.clear()
    deep(ask)
    assert seen == {(mine, None, None, 0) for mine in (True, False)}


def test_an_operator_is_told_the_first_time_it_is_recorded_too() -> None:
    x = DTensor.from_local(torch.ones(2, 4, device="meta"), MESH, [Shard(0)], shape=(4, 4)).requires_grad_()
    for _ in range(3):
        with trace() as found:
            x.erfc()
        assert found.operators == ["aten.erfc.default"]
