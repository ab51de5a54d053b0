"""The rule notation: read, written, broadcast, and refused where it makes no sense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard import NotationError, ShapeError, register_rule
from dshard.rules.rule import PassThrough, Rule, linear
from dshard.rules.rule_notation import parse_rule

FACTORS = st.sampled_from("abcdefg")


@st.composite
def rules(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """A rule in the notation, and shapes that fit."""
    sizes = {name: draw(st.integers(2, 5)) for name in "abcdefg"}
    whole = draw(st.sets(FACTORS))
    terms = [draw(st.lists(FACTORS, min_size=1, max_size=3, unique=True))]
    terms += draw(st.lists(st.lists(FACTORS, max_size=3, unique=True), max_size=2))
    out = draw(st.lists(st.sampled_from(sorted({name for term in terms for name in term})), unique=True))

    def side(names: list[str]) -> str:
        return " ".join(f"[{name}]" if name in whole else name for name in names)

    text = f"{', '.join(map(side, terms))} -> {side(out)}"
    return text, [tuple(sizes[name] for name in term) for term in terms]


@given(rules())
def test_a_rule_is_written_as_it_is_read(case: tuple[str, list[tuple[int, ...]]]) -> None:
    text, shapes = case

    rule = parse_rule(text, shapes)

    assert parse_rule(str(rule), shapes) == rule


def test_a_rule_names_the_factors_of_each_dim() -> None:
    rule = parse_rule("b s [h], k h -> (b s) k", [(2, 3, 4), (5, 4)])

    assert rule.inputs == ((("b",), ("s",), ("h",)), (("k",), ("h",)))
    assert rule.outputs == ((("b", "s"), ("k",)),)
    assert rule.unsharded == {"h"}
    assert str(rule) == "b s [h], k [h] -> (b s) k"


def test_leading_dims_align_at_the_right() -> None:
    rule = parse_rule("... m k, ... k n -> ... m n", [(7, 6, 2, 3), (6, 3, 4)])

    assert str(rule) == "_0 _1 m k, _1 k n -> _0 _1 m n"


def test_dims_of_size_one_are_broadcast() -> None:
    assert str(parse_rule("... a, ... a -> ... a", [(2, 1, 4), (3, 1)])) == "_0 [] a, _1 [] -> _0 _1 a"
    assert str(parse_rule("b 1 -> b h", [(2, 1)])) == "b [] -> b h"
    assert str(parse_rule("a b -> a b", [(1, 1)])) == "a b -> a b"


def test_dims_without_a_factor_are_not_sharded() -> None:
    assert str(parse_rule("n [...], [] n -> n [...]", [(2, 3, 4), (5, 2)], [(2, 7)])) == "n [] [], [] n -> n []"
    assert parse_rule("[...] -> [...] a", [(2, 3)], [(2,)]) == Rule((((), ()),), ((("a",),),))


def test_a_starred_term_is_that_of_any_number_of_tensors() -> None:
    assert str(parse_rule("a, *a b, c -> *a c", [(2,), (2, 3), (2, 3), (5,)], [(2, 5)] * 2)) == (
        "a, a b, a b, c -> a c, a c"
    )
    assert str(parse_rule("a, *b -> a", [(2,)])) == "a -> a"


def test_what_stands_between_two_ellipses_is_at_the_dims_that_a_call_names() -> None:
    shape = (2, 3, 4)

    assert str(parse_rule("... [d] ... -> ... [d] ...", [shape], at=[-2])) == "_0 [d] _1 -> _0 [d] _1"
    assert str(parse_rule("... r ... -> ... ...", [shape], at=[2, 0])) == "r0 _0 r1 -> _0"
    assert str(parse_rule("... [d] ... -> ... 1 ...", [shape], at=[0, 1])) == "[d0] [d1] _0 -> [] [] _0"
    assert str(parse_rule("... ... -> ... 1 ...", [shape], [(2, 3, 1, 4)], at=[-2])) == "_0 _1 _2 -> _0 _1 [] _2"
    assert str(parse_rule("... r ... -> ... ...", [()], at=[0])) == " -> "
    assert str(parse_rule("... r ... -> ... ...", [shape], at=[])) == "_0 _1 _2 -> _0 _1 _2"


def test_dims_that_differ_in_size_may_have_no_factor() -> None:
    rule = parse_rule("... v ..., ... i ... -> ... i ...", [(2, 3, 4), (5, 3, 1)], [(5, 3, 1)], at=[0], same_size=True)

    assert str(rule) == "v _0 [], i _0 [] -> i _0 []"


def test_a_scalar_has_an_empty_term() -> None:
    assert parse_rule("a ->", [(3,)]) == Rule(((("a",),),), ((),))
    assert parse_rule(", a -> a", [(), (3,)]).inputs == ((), (("a",),))


def test_what_is_reduced_how() -> None:
    assert parse_rule("a ->", [(3,)]).reductions() == ("sum",)
    assert parse_rule("a -> , ", [(3,)], reduce=("min", "max")).reductions() == ("min", "max")
    assert parse_rule("a ->", [(3,)], reduce="max").reductions() == ("max",)


def test_which_partial_operands_pass_through() -> None:
    assert linear(0, 2) == (PassThrough(frozenset({0})), PassThrough(frozenset({2})))
    assert PassThrough(frozenset({0})).ops == ("sum", "avg")


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("a b", [(2, 2)], r"the rule 'a b' has no '->': write it like 'm k, k n -> m n'"),
        ("a, b -> a", [(2,)], r"has 2 operands, but 1 were given"),
        ("a b -> a", [(2,)], r"gives a tensor 2 dims, but it has 1"),
        ("... a b -> a", [(2,)], r"gives a tensor \d dims, but it has 1"),
        ("... a ... -> a", [(2,)], r"has several '\.\.\.' in one term: it is not clear how many dims each is"),
        ("*a, *b -> a", [(2,)], r"has several '\*' on one side: it is not clear how many tensors each is"),
        ("a, *b, c -> a", [(2,)], r"has 2 operands, but 1 were given"),
        ("a$ -> a", [(2,)], r"cannot read '\$' in the rule"),
        ("(a b -> a", [(2,)], r"'\(' without '\)' in the rule"),
        ("a) -> a", [(2,)], r"'\)' without '\(' in the rule"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_rule(text, shapes)


def test_a_factor_has_one_size() -> None:
    with pytest.raises(ShapeError, match=r"the factor 'k' of the rule 'm k, k n -> m n' is 3 in one operand and 4"):
        parse_rule("m k, k n -> m n", [(2, 3), (4, 5)])


@pytest.mark.parametrize(
    ("op", "rule", "options", "message"),
    [
        ("nothing", "a -> a", {}, r"'nothing' is no operator name: write namespace::name, such as 'mylib::fused'"),
        ("mylib::f", "a b", {}, "has no '->'"),
        ("mylib::f", "a -> a", {"reduce": "mean"}, r"reduces by .*mean.*: use sum, avg, product, max, min"),
        ("mylib::f", "(a b -> a", {}, r"without '\)'"),
        ("mylib::f", "a -> a", {"linear": (1,)}, r"'a -> a' has no operand 1: linear counts its 1 from 0"),
        (
            "mylib::f",
            "a -> ,",
            {"reduce": ("sum", "max", "min")},
            r"has 2 outputs: give one reduction, or one for each",
        ),
    ],
)
def test_a_mistake_shows_at_registration(op: str, rule: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotationError, match=message):
        register_rule(op, rule, **options)


def test_numbers_in_a_merged_dim_are_blocks_of_it() -> None:
    rule = parse_rule("(2 f) k, k f -> f", [(10, 3), (3, 5)])

    assert rule.blocks == {"2"}
    assert dict(rule.sizes)["2"] == 2
    assert parse_rule("(3 f) ->", [(12,)]).sizes == (("3", 3), ("f", 4))
    for shapes in ([(12, 3), (3, 5)], [(9, 3), (3, 5)]):
        with pytest.raises(ShapeError, match=r"a dim of size \d+ is not \(2 f\) of the rule"):
            parse_rule("(2 f) k, k f -> f", shapes)
