"""Every registered operator equals single-device torch, values and gradients, however its operands lie."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.default_cases import one_in, one_way_each
from helpers.operator_samples import ELSEWHERE, SAMPLES, WITHOUT_VALUES, accepted_arguments, tagged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dshard import Mesh
from dshard.comm import bind, init_device_mesh
from dshard.dispatch.registry import TABLES
from dshard.testing import (
    RankPool,
    RuleError,
    check_call,
    check_rule,
    distribute,
    layouts,
    meshes,
    simulated,
    whole_numbers,
)
from dshard.testing.check import _Call, recorded_calls
from dshard.testing.rule_rows import layouts_of

THOROUGH = settings().max_examples > 100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MESH_SHAPES = ((3,), (2, 2))
pytestmark = [pytest.mark.thorough] if THOROUGH else []


@pytest.mark.parametrize(("name", "shape"), one_way_each(SAMPLES, MESH_SHAPES, every=4))
def test_an_operator_equals_its_single_device_self(name: str, shape: tuple[int, ...]) -> None:
    function, sample = moved(SAMPLES[name])

    check_rule(function, sample, mesh_shapes=[shape], limit=100 if THOROUGH else 1)


def check_on_ranks(names: list[str], shape: tuple[int, ...], seed: int) -> list[str]:
    """Each operator on this rank, its operands laid out at random: what went wrong."""
    draw, mesh, wrong = Random(seed), real_mesh(shape), []
    for name in names:
        function, sample = moved(SAMPLES[name])
        laid = [draw.choice(layouts_of(x, mesh)) for x in tensors(sample)]
        try:
            check_call(function, sample, laid)
        except RuleError as error:
            wrong.append(f"{name}: {error}")
    return wrong


@cache
def real_mesh(shape: tuple[int, ...]) -> Mesh:
    return bind(init_device_mesh(DEVICE if dist.get_backend() == "nccl" else "cpu", shape))


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.thorough), (2, 2)])
@pytest.mark.parametrize("seed", range(20 if THOROUGH else 1))
def test_operators_on_real_ranks(ranks: RankPool, shape: tuple[int, ...], seed: int) -> None:
    names = list(SAMPLES)[:: 1 if THOROUGH else 12]

    assert ranks.run(check_on_ranks, names, shape, seed, timeout=600.0) == [[]] * 4


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.ranks
def test_operators_on_a_rank_of_nccl() -> None:
    with RankPool(1, backend="nccl") as pool:
        assert pool.run(check_on_ranks, list(SAMPLES), (1,), 0, timeout=600.0) == [[]]


@given(st.sampled_from(sorted(SAMPLES)), meshes(max_ranks=8), st.data())
def test_any_operator_on_any_mesh(name: str, mesh: Mesh, data: st.DataObject) -> None:
    function, sample = SAMPLES[name]
    laid = [
        data.draw(layouts(mesh, x.dim(), partial=("sum",) if x.is_floating_point() else ())) for x in tensors(sample)
    ]

    check_call(function, sample, laid)


@pytest.mark.parametrize("func", one_in(5, tagged()), ids=str)
def test_what_torch_tags_pointwise_is(func: Any) -> None:
    sample = accepted_arguments(func)
    if sample is None or func._schema.name == "aten::equal":
        pytest.skip("takes no arguments that we can make up")

    check_rule(func, sample, mesh_shapes=MESH_SHAPES[: 2 if THOROUGH else 1], limit=20 if THOROUGH else 2)


def test_every_registered_operator_has_a_sample() -> None:
    covered = {func._schema.name.removesuffix("_") for sample in SAMPLES.values() for func in called(*sample)}

    missing = {name for table in TABLES for name in table} - covered - set(WITHOUT_VALUES) - set(ELSEWHERE)
    missing -= {"aten::cholesky"} if torch.__version__ >= "2.14" else set()  # which has no function there

    assert not missing, f"add samples of {', '.join(sorted(missing))} to operator_samples.py"


def called(function: Any, sample: tuple[Any, ...]) -> list[Any]:
    """The operators that check_rule verifies for a sample."""
    expected = _Call.of(function, sample).on_one_device(gradients=True)
    return [func for func, _, _ in recorded_calls(function, *arguments(sample), expected.recorded)]


@pytest.mark.parametrize(
    "make", [torch.empty_like, lambda x: x.new_empty(4, 3), lambda x: x.new_empty_strided((5, 3), (3, 1))]
)
@pytest.mark.parametrize("shape", MESH_SHAPES)
def test_new_memory_is_laid_out(make: Any, shape: tuple[int, ...]) -> None:
    mesh, x = Mesh(shape), whole_numbers((5, 3))
    for layout in layouts_of(x, mesh):
        with simulated(mesh):
            made = make(distribute(x, layout))

        assert made.shape == make(x).shape
        for rank in mesh.ranks:
            right = made.layout.local_shape(made.shape, mesh.coordinate(rank))
            assert made._local_tensor._local_tensors[rank].shape == right


def moved(tree: Any) -> Any:
    """Arguments on the device on which operators are tested."""
    if isinstance(tree, tuple | list):
        return type(tree)(map(moved, tree))
    if isinstance(tree, dict):
        return {name: moved(item) for name, item in tree.items()}
    return tree.to(DEVICE) if isinstance(tree, Tensor) else tree


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among arguments, in order."""
    if isinstance(tree, tuple | list):
        return [x for item in tree for x in tensors(item)]
    if isinstance(tree, dict):
        return [x for item in tree.values() for x in tensors(item)]
    return [tree] if isinstance(tree, Tensor) else []


def arguments(sample: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})
