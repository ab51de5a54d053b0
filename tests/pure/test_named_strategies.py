"""Which strategies by name a search tries: those of all axes alike, and then mixtures of the cheapest."""

from __future__ import annotations

from itertools import count, product
from math import sqrt

from dshard.mesh import Mesh
from dshard.parallel.auto import Auto, PlanSearch
from dshard.parallel.plan_values import Cost, Memory, ModelPlan, PlanOptions

MESH = Mesh((4, 4), ("x", "y"))
SECONDS = {"data": 3.0, "fsdp": 2.0, "megatron": 9.0, "context": 8.0, "ulysses": 7.0}


def tried(most: float, least: dict[str, float] | None = None) -> list[str]:
    """The names that a search prices, in order, where a mixture takes the geometric mean of what it mixes."""
    number = count()

    def price(plan: ModelPlan) -> Cost:
        first, _, second = plan.strategy.partition(" x ")
        a, b = SECONDS.get(first, 20.0), SECONDS.get(second, 20.0)
        return Cost((), Memory(0, 0, 0, 0, 0), work=sqrt(a * b) + 1e-6 * next(number))

    search = PlanSearch(Auto(seconds=1e6), PlanOptions(None, None), price, None)
    names = [*map(" x ".join, product(SECONDS, repeat=2)), "atp"]
    plans = [ModelPlan(name, MESH, {}, {}) for name in names[::-1]]
    search.add_named([((least or {}).get(plan.strategy, 0.0), plan) for plan in plans], MESH, most)
    return [each.plan.strategy for each in search.priced]


def test_strategies_of_all_axes_alike_are_tried_first_and_then_mixtures_of_the_cheapest() -> None:
    names = tried(7)

    assert {*names[:5]} == {f"{name} x {name}" for name in SECONDS}
    assert {*names[5:]} == {"data x fsdp", "fsdp x data"}


def test_a_strategy_that_takes_more_at_least_than_another_is_not_tried() -> None:
    names = tried(100, {"ulysses x ulysses": 3.5, "data x fsdp": 2.2})

    assert "ulysses x ulysses" not in names
    assert "data x fsdp" not in names
    assert names[-1] == "atp"
    assert len(names) == len(SECONDS) ** 2 + 1 - 2
