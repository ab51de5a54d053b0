"""numpy and its kin take the global value of a distributed tensor, on all ranks alike."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dshard
from dshard import Partial, Replicate, Shard, distribute_tensor
from dshard.testing import RankPool, count_traffic

BASE = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)  # uneven on four ranks
WAYS: dict[str, Any] = {
    "numpy": lambda x: x.numpy(),
    "force": lambda x: x.clone().requires_grad_().numpy(force=True),
    "asarray": np.asarray,
    "asarray of another dtype": lambda x: np.asarray(x, dtype=np.float32),
    "array": np.array,
    "of another kind": lambda x: x.long().numpy(),
    "cpu": lambda x: x.cpu().numpy(),
    "data": lambda x: x.data.numpy(),
    "tolist": lambda x: np.array(x.tolist()),
    "rows": lambda x: np.stack([row.numpy() for row in x]),
    "numbers": lambda x: np.array([[float(number) for number in row] for row in x]),
    "stack": lambda x: np.concatenate([x, x])[: len(x)],
    "dlpack": np.from_dlpack,
    "torch's dlpack": lambda x: torch.from_dlpack(x).numpy(),
    "ufunc": lambda x: (np.sqrt(x) ** 2 if isinstance(x, Tensor) else x).numpy(),
}
REFUSED: dict[str, Any] = {
    "gradient": (lambda x: x.requires_grad_(), lambda x: x.numpy()),
    "array of gradient": (lambda x: x.requires_grad_(), np.asarray),
    "dlpack of gradient": (lambda x: x.requires_grad_(), np.from_dlpack),
    "bfloat16": (lambda x: x.bfloat16(), lambda x: x.numpy()),
}
"""What torch refuses, too: an operand, and what is asked of it."""


def layouts() -> list[Any]:
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(BASE, mesh, [Replicate(), Replicate()])
    ways = ([Replicate()] * 2, [Shard(0)] * 2, [Partial(), Shard(1)], [Replicate(), Partial()])
    return [x.redistribute(placements=placements) for placements in ways]


def wrong_values() -> list[str]:
    wrong = []
    for x in layouts():
        for name, way in WAYS.items():
            found = way(x)
            if found.dtype != way(BASE).dtype or not np.allclose(found, BASE.numpy()):
                wrong.append(f"{name} of [{x.layout}]: {found}")
        np.testing.assert_allclose(x, BASE)
        for name, (operand, ask) in REFUSED.items():
            with pytest.raises(Exception, match=r".") as torchs:
                ask(operand(BASE.clone()))
            y = operand(x.detach().clone())
            with count_traffic() as traffic, pytest.raises(type(torchs.value)) as ours:
                ask(y)
            if str(ours.value) != str(torchs.value) or traffic.collectives:
                wrong.append(f"{name}: {ours.value}, not {torchs.value}, {traffic}")
        is_shared = x.layout.is_replicated()
        memory = [(each.flags.writeable, np.shares_memory(each, x.to_local())) for each in (x.numpy(), np.asarray(x))]
        wrong += [] if memory == [(is_shared, is_shared)] * 2 else [f"memory of [{x.layout}]: {memory}"]
    return wrong


@pytest.mark.ranks
def test_numpy_takes_the_global_value_in_every_layout(ranks: RankPool) -> None:
    assert ranks.run(wrong_values) == [[]] * 4


def other_libraries(library: str) -> bool:
    *_, x = layouts()
    scores, labels = x.softmax(-1), (BASE.argmax(-1) + torch.arange(5)) % 3
    plain = BASE.softmax(-1)
    if library == "pandas":
        pandas = pytest.importorskip(library)
        frame, expected = pandas.DataFrame(scores), pandas.DataFrame(plain)
        return bool(np.allclose(frame, expected)) and np.allclose(pandas.Series(x[:, 0]), BASE[:, 0])
    if library == "sklearn":
        metrics = pytest.importorskip("sklearn.metrics")
        predicted = scores.argmax(-1)
        score = metrics.accuracy_score(labels, predicted), metrics.log_loss(labels, scores)
        return bool(np.allclose(score, (metrics.accuracy_score(labels, [2] * 5), metrics.log_loss(labels, plain))))
    if library == "torchmetrics":
        functional = pytest.importorskip(f"{library}.functional")
        with dshard.implicit_replication():
            found = functional.mean_squared_error(scores, plain * 2)
        return bool(np.allclose(float(found), float(functional.mean_squared_error(plain, plain * 2))))
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    [line] = axes.plot(x[:, 0])
    axes.imshow(scores)
    axes.hist(x[:, 1])
    axes.scatter(x[:, 0], x[:, 1])
    figure.savefig(io.BytesIO())
    return bool(np.allclose(line.get_ydata(), BASE[:, 0]))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "library", ["pandas", pytest.param("sklearn", marks=pytest.mark.thorough), "torchmetrics", "matplotlib"]
)
def test_libraries_take_what_a_model_gives(ranks: RankPool, library: str) -> None:
    pytest.importorskip(library)
    assert ranks.run(other_libraries, library) == [True] * 4
