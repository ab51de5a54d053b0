"""Equal layouts, meshes, topologies and plans are one object, in every thread and after every copy."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from dataclasses import replace
from threading import Event, Thread
from weakref import ref

import pytest

from dshard import Layout, Mesh, Replicate, Shard, interned
from dshard.redistribute import plan
from dshard.reshard import plan_reshard
from dshard.topology import Topology


def layouts(first: int = 0) -> tuple[Layout, Layout]:
    mesh = Mesh((2, 2), ("a", "b"), (first, first + 1, first + 2, first + 3))
    return Layout(mesh, (Shard(0), Replicate())), Layout(mesh, (Shard(1), Shard(1)), ((1, (1, 0)),))


MAKERS: dict[str, Callable[[], object]] = {
    "mesh": lambda: Mesh((3,), ("x",)),
    "layout": lambda: layouts()[1],
    "topology": lambda: replace(Topology.preset("dgx-h100", nodes=2), name="mine"),
    "plan": lambda: plan(*layouts(), (8, 8), 4, Topology.preset("cpu")),
    "plan between meshes": lambda: plan_reshard(layouts()[0], layouts(4)[1], (8, 8), 4, Topology.preset("cpu")),
}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_values_are_one_object(name: str) -> None:
    value = MAKERS[name]()

    assert MAKERS[name]() is value
    for again in (copy(value), deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert again is value


def test_threads_make_one_object() -> None:
    with ThreadPoolExecutor(8) as threads:
        for size in range(2, 200):
            made = [*threads.map(lambda n: Mesh((n,), ("threaded",)), [size] * 8)]
            assert len({id(mesh) for mesh in made}) == 1


def test_a_process_that_is_forked_while_a_thread_makes_a_value_makes_its_own() -> None:
    held, done = Event(), Event()

    def hold() -> None:
        with interned._LOCK:
            held.set()
            done.wait()

    thread = Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(5)  # ends a child that waits for the lock
        os._exit(0 if Mesh((7,), ("forked",)).size == 7 else 1)
    done.set()
    thread.join()

    assert os.waitpid(child, 0)[1] == 0


def test_a_value_that_nothing_refers_to_is_freed() -> None:
    mesh = Mesh((5,), ("freed",))
    gone = ref(mesh)
    del mesh
    gc.collect()

    assert gone() is None
