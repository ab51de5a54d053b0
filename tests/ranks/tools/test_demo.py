"""The demo learns, and its layouts fit its model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

from dshard import parallelize, trace
from dshard.layout import parse_layout
from dshard.parallel import ModelPlan, plan_model
from dshard.placements import Replicate, Shard
from dshard.testing import RankPool, distribute, rank_pool, simulated, whole
from dshard.tools.demo import BATCH, Progress, Row, Settings, draw, names, predict, rank
from dshard.tools.demo import train as train_module
from dshard.tools.demo.train import (
    SINGLE,
    Digits,
    MissingExtra,
    UnknownStrategy,
    batches,
    example,
    find,
    load,
    run,
    train,
    train_all,
)
from dshard.tools.demo.vit import build

WAIT = 120.0  # seconds for ranks to start on a busy machine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are trained fastest, and tests disturb each other least, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ignore(progress: Progress) -> None:
    """Hear nothing."""


class TestTraining:
    @pytest.mark.thorough
    def test_the_model_learns(self) -> None:
        run = train(SINGLE, Settings(), ignore)

        assert run.test_accuracy >= 0.95
        assert run.losses[0] > 2 > 0.2 > run.losses[-1]

    def test_every_step_is_told(self) -> None:
        told: list[Progress] = []

        losses = train(SINGLE, Settings(steps=3), told.append).losses

        assert told == [Progress("single", step + 1, loss) for step, loss in enumerate(losses)]

    def test_the_same_seed_gives_the_same_losses(self) -> None:
        first, again, other = (train(SINGLE, Settings(steps=2, seed=seed), ignore).losses for seed in (3, 3, 4))

        assert first == again
        assert first != other

    def test_the_precision_is_the_one_asked_for(self) -> None:
        model = build(seed=0, dtype=torch.float64)

        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        assert model(torch.zeros(2, 8, 8, dtype=torch.float64)).shape == (2, 10)

    def test_building_leaves_the_global_generator_alone(self) -> None:
        state = torch.get_rng_state()

        build(seed=1)

        assert torch.get_rng_state().equal(state)


class TestData:
    def test_training_and_test_images_are_all_images(self) -> None:
        training, test = load()

        assert (len(training), len(test)) == (1442, 355)
        assert training.images.shape[1:] == (8, 8)

    def test_each_digit_has_its_share_in_the_test(self) -> None:
        training, test = load()

        shares = test.labels.bincount() / (test.labels.bincount() + training.labels.bincount())

        assert shares.min() > 0.19
        assert shares.max() <= 0.2

    def test_a_pass_shows_every_image_once(self) -> None:
        numbered = Digits(torch.arange(12.0), torch.arange(12))

        seen = [batch.labels.tolist() for batch in batches(numbered, size=4, steps=6, seed=0)]

        assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:])) == list(range(12))
        assert seen[:3] != seen[3:]

    def test_a_batch_may_span_passes(self) -> None:
        numbered = Digits(torch.arange(3.0), torch.arange(3))

        assert [len(batch) for batch in batches(numbered, size=7, steps=2, seed=0)] == [7, 7]

    def test_a_missing_package_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(train_module, "find_spec", lambda name: None)

        with pytest.raises(MissingExtra, match=r'pip install "dshard\[demo\]"'):
            run(Settings(), ignore)


def plan_of(name: str) -> ModelPlan:
    """The plan of the demo's model on four ranks."""
    strategy = find(name)
    mesh = strategy.on(4)
    assert mesh is not None
    return plan_model(build(seed=0), mesh, strategy.plan, example(torch.float32, batch=8))


class TestStrategies:
    def test_megatron_splits_columns_then_rows(self) -> None:
        where = plan_of("megatron").parameters

        assert {name for name, placements in where.items() if placements == (Shard(1),)} == {
            f"blocks.{block}.{linear}.weight" for block in (0, 1) for linear in ("attention.out", "down")
        }
        assert {name for name, placements in where.items() if placements == (Shard(0),)} == {
            f"blocks.{block}.{linear}.{part}"
            for block in (0, 1)
            for linear in ("attention.qkv", "up")
            for part in ("weight", "bias")
        }

    def test_what_is_not_split_is_replicated(self) -> None:
        assert plan_of("data x tensor").placements("head.weight") == (Replicate(), Replicate())

    @pytest.mark.parametrize(
        ("name", "ranks", "mesh"),
        [
            ("data", 4, "dp=4"),
            ("data x tensor", 4, "dp=2 tp=2"),
            ("data x tensor", 3, "dp=1 tp=3"),
            ("data x tensor", 1, "dp=1 tp=1"),
            ("summa", 4, "r=2 c=2"),
            ("summa", 3, "r=1 c=3"),
            ("atp", 8, "d1=4 d2=2"),
            ("tesseract", 8, "d=2 r=2 c=2"),
            ("tesseract", 16, "d=4 r=2 c=2"),
            ("tesseract", 4, "d=1 r=2 c=2"),
            ("single", 4, "None"),
        ],
    )
    def test_a_mesh_uses_all_ranks(self, name: str, ranks: int, mesh: str) -> None:
        assert str(find(name).on(ranks)) == mesh

    def test_tesseract_takes_part_where_it_has_a_depth(self) -> None:
        four, eight = ([strategy.name for strategy in Settings(ranks=ranks).chosen()] for ranks in (4, 8))

        assert four == ["single", "data", "megatron", "data x tensor", "summa", "atp"]
        assert eight == [*four, "tesseract"]

    def test_a_strategy_that_would_leave_ranks_without_heads_takes_no_part(self) -> None:
        assert set(names(8)) - set(names(16)) == {"megatron"}

    def test_hyphens_stand_for_spaces(self) -> None:
        assert find("data-x-tensor") is find("data x tensor")

    def test_an_unknown_name_lists_the_known(self) -> None:
        with pytest.raises(UnknownStrategy, match="no strategy is called 'zero'; there are single, data, megatron"):
            find("zero")

    def test_a_single_device_comes_first_and_none_twice(self) -> None:
        chosen = Settings(strategies=("data-x-tensor", "data", "single", "data")).chosen()

        assert [strategy.name for strategy in chosen] == ["single", "data x tensor", "data"]


@pytest.mark.ranks
class TestLayouts:
    @pytest.mark.parametrize(
        ("chosen", "dtype", "tolerance"),
        [
            pytest.param(("single", "data x tensor"), torch.float64, 1e-12, marks=pytest.mark.thorough),
            pytest.param(tuple(names(4)), torch.float64, 1e-12, marks=pytest.mark.thorough),
            pytest.param(tuple(names(4)), torch.float32, 1e-5, marks=pytest.mark.thorough),
        ],
    )
    def test_every_layout_follows_the_single_device(
        self, ranks: RankPool, chosen: tuple[str, ...], dtype: torch.dtype, tolerance: float
    ) -> None:
        rows, *others = ranks.run(train_all, Settings(chosen, steps=2, dtype=dtype), ignore, timeout=WAIT)

        assert tuple(row.strategy for row in rows) == chosen
        assert max(row.max_loss_diff for row in rows) < tolerance
        assert all(len(row.losses) == 2 and row.losses[-1] == row.final_loss for row in rows)
        assert others == [[], [], []]
        for row in rows[1:]:
            predicted = predict(find(row.strategy), 4, BATCH, dtype=dtype)
            assert row.collectives_per_step == predicted.collectives
            assert 0.9 * predicted.nbytes < row.bytes_per_step <= predicted.nbytes  # of rank 0, and of the busiest

    @pytest.mark.thorough
    def test_ranks_that_divide_nothing_follow_too(self) -> None:
        rows, *_ = rank_pool(3).run(train_all, Settings(steps=2, ranks=3), ignore, timeout=WAIT)

        assert max(row.max_loss_diff for row in rows) < 1e-5


@pytest.mark.ranks
@pytest.mark.thorough
def test_the_losses_of_one_device_and_of_both_tesseracts_coincide() -> None:
    """Tesseract, figure 7, in miniature: fifty steps on one device, [2, 2, 1] and [2, 2, 2]."""
    settings = [Settings(("tesseract",), ranks=ranks, steps=50, dtype=torch.float64) for ranks in (4, 8)]

    found = [rank_pool(s.ranks).run(train_all, s, ignore, timeout=5 * WAIT)[0][1] for s in settings]

    assert [row.mesh for row in found] == ["d=1 r=2 c=2", "d=2 r=2 c=2"]
    assert max(row.max_loss_diff for row in found) < 1e-9
    assert found[0].losses[0] > 2 * found[0].losses[-1]


class TestAtp:
    def test_nothing_is_moved_between_the_layers_of_a_perceptron(self) -> None:
        """ATP, section 3.2: a block that is column-first then row-first reduces twice, once on each axis."""
        strategy, model = find("atp"), build(seed=0, dtype=torch.float64)
        mesh = strategy.on(4)
        assert mesh is not None
        x = torch.randn(4, 16, 64, dtype=torch.float64)
        expected = F.gelu(model.blocks[0].up(x))
        expected = model.blocks[0].down(expected).detach()
        with simulated(mesh):
            parallelize(model, mesh, strategy.plan, example(torch.float64, batch=4))
            block, laid = model.blocks[0], distribute(x, parse_layout("d1:R d2:S(2)", mesh))
            with trace() as sent:
                y = block.down(F.gelu(block.up(laid))).redistribute(placements=laid.placements)
            found = whole(y.detach())

        assert [(event.collective, event.axis) for event in sent.events] == [("all_reduce", "d2"), ("all_reduce", "d1")]
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


class TestPredictions:
    def test_the_shortest_communication_comes_first(self) -> None:
        ranked = rank(2, batch=16)

        assert {found.strategy for found in ranked} == set(names(2)) - {"single"}
        assert [found.seconds for found in ranked] == sorted(found.seconds for found in ranked)


class TestCurves:
    ROWS = (
        Row("single", "1 device", 1.0, 0.0, 0.5, 0, 0, 1.0, (4.0, 2.0, 1.0)),
        Row("a < b", "x=2", 1.0, 0.0, 0.5, 0, 0, 1.0, (4.0, 2.0, 1.0)),
    )

    def test_equal_losses_are_one_curve(self) -> None:
        root = ElementTree.fromstring(draw(self.ROWS))
        first, second = (line.attrib["points"] for line in root.iter("{http://www.w3.org/2000/svg}polyline"))

        assert first == second
        heights = [float(point.split(",")[1]) for point in first.split()]
        assert heights == sorted(heights)  # y grows downwards, and the losses fall

    def test_names_are_escaped(self) -> None:
        texts = [node.text for node in ElementTree.fromstring(draw(self.ROWS)).iter("{http://www.w3.org/2000/svg}text")]

        assert "a < b (x=2), 50.0% right" in texts
