"""Views written to, and what views move."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from helpers.view_cases import Function, assert_same, rows

from dshard import Layout, LayoutError, Mesh, Partial, Replicate, Shard
from dshard.comm import CommEvent, listen
from dshard.layout import parse_layout
from dshard.testing import distribute, simulated, whole
from dshard.testing.rule_rows import layouts_of

Moves: TypeAlias = tuple[Function, tuple[int, ...], str, str]

FREE: dict[str, Moves] = {
    "view splits a dim": (lambda x: x.view(4, 2, 3), (8, 3), "x:S(0) y:S(1)", "x:S(0) y:S(2)"),
    "view merges the major dim": (lambda x: x.view(32, 3), (8, 4, 3), "x:S(0) y:S(2)", "x:S(0) y:S(1)"),
    "view merges both": (lambda x: x.view(4), (2, 2), "x:S(0) y:S(1)", "x:S(0) y:S(0)"),
    "view splits for both": (lambda x: x.view(2, 2), (4,), "x:S(0) y:S(0)", "x:S(0) y:S(1)"),
    "view regroups": (lambda x: x.view(4, 6), (6, 4), "x:S(0) y:R", "x:S(0) y:R"),
    "heads": (lambda x: x.view(5, 3, 4, 2).transpose(1, 2), (5, 3, 8), "x:S(0) y:S(2)", "x:S(0) y:S(1)"),
    "attention's batch": (lambda x: x.reshape(8, 5, 2), (2, 4, 5, 2), "x:S(0) y:S(1)", "x:S(0) y:S(0)"),
    "partial": (lambda x: x.reshape(8, 5).t()[:, 2:5], (2, 4, 5), "x:P(sum) y:P(sum)", "x:P(sum) y:P(sum)"),
    "permute": (lambda x: x.permute(2, 0, 1), (5, 3, 7), "x:S(0) y:S(2)", "x:S(1) y:S(0)"),
    "squeeze": (lambda x: x.squeeze(), (2, 1, 3), "x:S(0) y:S(2)", "x:S(0) y:S(1)"),
    "unsqueeze": (lambda x: x.unsqueeze(1), (5, 3), "x:S(0) y:S(1)", "x:S(0) y:S(2)"),
    "expand": (lambda x: x.expand(4, 5, 3), (5, 1), "x:S(0) y:R", "x:S(1) y:R"),
    "slice of another dim": (lambda x: x[:, 1:3], (5, 4), "x:S(0) y:S(0)", "x:S(0) y:S(0)"),
    "split of another dim": (lambda x: x.split(2, 1)[1], (5, 4), "x:S(0) y:R", "x:S(0) y:R"),
    "cat": (lambda x: torch.cat([x, x], 1), (5, 4), "x:S(0) y:P(sum)", "x:S(0) y:P(sum)"),
    "tril": (lambda x: x.tril(1), (5, 4), "x:S(0) y:S(1)", "x:S(0) y:S(1)"),
    "like": (torch.ones_like, (5, 4), "x:S(0) y:P(sum)", "x:S(0) y:R"),
    "new of the same rows": (lambda x: x.new_zeros(5, 7), (5, 4), "x:S(0) y:P(sum)", "x:S(0) y:R"),
    "new of another shape": (lambda x: x.new_ones(2, 3, 4), (5, 4), "x:S(0) y:S(1)", "x:R y:R"),
}
"""Operators that move nothing: layouts before and after."""


@pytest.mark.parametrize("name", FREE)
def test_free_views_send_nothing(name: str) -> None:
    function, shape, before, after = FREE[name]
    mesh = Mesh((2, 2), ("x", "y"))
    value = rows(*shape)
    with simulated(mesh), listen(never):
        out = function(distribute(value, parse_layout(before, mesh)))
        assert str(out.layout) == after
        assert_same(out, function(value))


def never(event: CommEvent) -> None:
    raise AssertionError(f"this should have moved nothing: {event}")


IN_PLACE: dict[str, Function] = {
    "view": lambda x: x.view(4, 2, 2).mul_(2),
    "t_": lambda x: x.t_().add_(1),
    "transpose_": lambda x: x.transpose_(0, 1),
    "squeeze_": lambda x: x.unsqueeze_(1).squeeze_(1).unsqueeze_(0).squeeze_(),
    "tril_": lambda x: x.tril_(-1),
    "scatter_": lambda x: x.scatter_(1, (x > 0).long(), 3.0),
    "index_fill_": lambda x: x.index_fill_(1, (x > 0).long()[0, :2], 3.0),
    "mask": lambda x: x.__setitem__(x > 0, 5.0),
    "mask of rows": lambda x: x.__setitem__(x[:, 0] > 0, 5.0),
    "row": lambda x: x[:, 1:3].mul_(2),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_in_place_views_change_shape_and_strides(name: str, placement: Replicate | Shard) -> None:
    mesh = Mesh((3,), ("x",))
    value, expected = rows(4, 4), rows(4, 4)
    IN_PLACE[name](expected)
    with simulated(mesh):
        x = distribute(value, Layout(mesh, (placement,)))
        IN_PLACE[name](x)
        assert x.shape == expected.shape
        assert x.stride() == expected.stride()
        assert_same(x, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("last", [(True, False), (False, True), (True, True)], ids=str)
def test_convolutions_have_channels_last_where_one_device_has(last: tuple[bool, bool], transposed: bool) -> None:
    """So a view that merges the batch and the positions is one, and what is written to it is in the result."""

    def pixels(*operands: Any) -> Any:
        formats = (torch.channels_last if each else torch.contiguous_format for each in last)
        function = F.conv_transpose2d if transposed else F.conv2d
        out = function(*(x.contiguous(memory_format=each) for x, each in zip(operands, formats, strict=True)))
        out.permute(0, 2, 3, 1).view(-1, out.shape[1])[1:].mul_(2)
        return out

    mesh, values = Mesh((2,), ("x",)), (rows(3, 4, 5, 5), rows(4, 4, 3, 3))
    expected = pixels(*values)
    for placement in (Replicate(), Shard(0), Shard(1)):
        with simulated(mesh):
            out = pixels(*(distribute(x, Layout(mesh, (placement,))) for x in values))
            assert out.stride() == expected.stride()
            assert_same(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 5, 5, 5), (1, 4, 5, 5, 5)], ids=str)
def test_convolutions_of_volumes_have_the_strides_of_one_device(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch's kernels of processors differ by batch and dtype."""

    def pixels(x: Any, weight: Any) -> Any:
        out = F.conv3d(x.contiguous(memory_format=torch.channels_last_3d), weight)
        if out.permute(0, 2, 3, 4, 1).is_contiguous():
            out.permute(0, 2, 3, 4, 1).view(-1, out.shape[1])[1:].mul_(2)
        return out

    mesh, values = Mesh((2,), ("x",)), (rows(*shape).to(dtype), rows(4, 4, 3, 3, 3).to(dtype))
    expected = pixels(*values)
    for placement in (Replicate(), Shard(0), Shard(1)):
        with simulated(mesh):
            out = pixels(*(distribute(x, Layout(mesh, (placement,))) for x in values))
            assert out.stride() == expected.stride()
            torch.testing.assert_close(whole(out), expected)


def _in_other_dims(view: Any, method: str, *dims: int) -> Any:
    view = view.sin()[1:4] if method == "t_" else view.sin().view(1, 4, 4)
    getattr(view, method)(*dims)
    view[0].mul_(3)
    return view


@pytest.mark.parametrize("method", [("t_",), ("squeeze_", 0), ("unsqueeze_", 1), ("transpose_", 1, 2)], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_a_write_to_a_view_whose_dims_changed_in_place_has_the_gradient_of_one_device(
    method: Any, placement: Any
) -> None:
    mesh, plain = Mesh((3,), ("x",)), rows(4, 4).requires_grad_()
    expected = _in_other_dims(plain, *method)
    (gradient,) = torch.autograd.grad(expected.square().sum(), plain)
    with simulated(mesh):
        x = distribute(plain.detach(), Layout(mesh, (placement,))).requires_grad_()
        out = _in_other_dims(x, *method)
        assert_same(out.detach(), expected.detach())
        assert_same(torch.autograd.grad(out.square().sum(), x)[0], gradient)


def _written_after(method: str, dims: tuple[int, ...], of_view: bool, is_recorded: bool, *tensors: Any) -> list[Any]:
    """What is written through a view taken before its base, or another view of it, got other dims; the gradient."""
    x, weight = tensors
    x = x * weight if is_recorded else x
    base = x[1:] if of_view else x
    base.tag = "kept"
    view = base[:, 1:3][0]
    getattr(base, method)(*dims)
    view.mul_(weight.sum())
    base[0].mul_(weight[0, 0])
    assert base.tag == "kept"
    (gradient,) = torch.autograd.grad(x.square().sum() + view.sum(), weight)
    return [x.detach(), base.detach(), view.detach(), gradient]


_OTHER_DIMS: list[Any] = [("t_",), ("unsqueeze_", 1), ("transpose_", 0, 1), ("as_strided_", (3, 2, 2), (4, 2, 1))]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("method", _OTHER_DIMS, ids=str)
def test_a_write_to_a_view_taken_before_dims_change_in_place_has_the_gradient_of_one_device(
    method: Any, of_view: bool, is_recorded: bool
) -> None:
    mesh, values = Mesh((2,), ("x",)), (rows(4, 4), rows(4, 4).cos())
    name, *dims = method
    written = partial(_written_after, name, tuple(dims), of_view, is_recorded)
    of_one_device = written(values[0].clone(), values[1].clone().requires_grad_())
    for placement in (Replicate(), Shard(0), Shard(1)):
        with simulated(mesh):
            x, weight = (distribute(value, Layout(mesh, (placement,))) for value in values)
            for found, expected in zip(written(x, weight.requires_grad_()), of_one_device, strict=True):
                assert_same(found, expected)


def test_what_has_views_and_retains_its_gradient_is_refused_other_dims_in_place() -> None:
    mesh = Mesh((2,), ("x",))
    with simulated(mesh):
        x = distribute(rows(4, 4), Layout(mesh, (Shard(0),))).requires_grad_().exp()
        x.retain_grad()
        row = x[0]
        with pytest.raises(LayoutError, match=r"t_ of a tensor .* that retains its gradient: .* x = x.t\(...\)"):
            x.t_()
        assert row.shape == (4,)


def _with_views(x: Any) -> list[Any]:
    part, columns = x[1:3], x[:, 1:3]
    row = columns[0]
    x.t_()
    part.mul_(2)
    columns.t_()
    x[1].add_(7)
    part.unsqueeze_(0)
    row.add_(3)
    x.unsqueeze_(1)
    part[0, 1].mul_(5)
    columns[1].sub_(4)
    return [x, part, columns, row]


@pytest.mark.parametrize("placements", list(itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)))
def test_views_taken_before_dims_change_in_place_show_what_is_written(placements: tuple[Any, ...]) -> None:
    mesh, value = Mesh((2, 2), ("x", "y")), rows(4, 5)
    with simulated(mesh):
        found = _with_views(distribute(value, Layout(mesh, placements)))
        for x, expected in zip(found, _with_views(value.clone()), strict=True):
            assert_same(x, expected)


@pytest.mark.parametrize("layout", ["x:R", "x:S(0)", "x:P(sum)"])
def test_strides_over_the_whole_tensor(layout: str) -> None:
    mesh = Mesh((3,), ("x",))
    value = rows(4, 3)
    with simulated(mesh):
        x = distribute(value, parse_layout(layout, mesh))
        assert_same(x.as_strided((2, 6), (6, 1)), value.view(2, 6))
        assert_same(x.as_strided((3, 2), (2, 3), 1), value.as_strided((3, 2), (2, 3), 1))
        assert_same(x.t().as_strided((3, 4), (1, 3)), value.t())


@pytest.mark.parametrize("layout", ["x:R", "x:S(0)"])
@pytest.mark.parametrize("view", [lambda z: z.real, lambda z: z.imag[1:], lambda z: z.conj(), lambda z: z.conj()[1:]])
def test_strides_over_other_numbers_than_those_of_the_base_are_refused(layout: str, view: Function) -> None:
    """They would be strides over the complex numbers that the tensor itself has."""
    mesh = Mesh((3,), ("x",))
    value = torch.complex(rows(4, 3), rows(4, 3).flip(0))
    with simulated(mesh):
        z = distribute(value, parse_layout(layout, mesh))
        with pytest.raises(LayoutError, match=r"as_strided of a view in .* of other numbers"):
            view(z).as_strided((2, 2), (2, 1))
        assert_same(view(z).clone().as_strided((2, 2), (2, 1)), view(value).clone().as_strided((2, 2), (2, 1)))
        assert_same(z[1:].as_strided((2, 2), (2, 1)), value[1:].as_strided((2, 2), (2, 1)))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_write_through_strides_beyond_a_view_has_the_gradient_of_one_device(in_place: bool) -> None:
    def written(x: Any, weight: Any) -> list[Any]:
        strided = x[:, 1:3]
        strided = (strided.as_strided_ if in_place else strided.as_strided)((2, 2), (2, 1), 1)
        strided.mul_(weight.sum())
        return [x.detach(), *torch.autograd.grad(x.square().sum() + strided.sum(), weight)]

    mesh, values = Mesh((2,), ("x",)), (rows(4, 4), rows(3))
    of_one_device = written(values[0].clone(), values[1].clone().requires_grad_())
    for placement in (Replicate(), Shard(0)):
        with simulated(mesh):
            x, weight = (distribute(value, Layout(mesh, (placement,))) for value in values)
            for found, expected in zip(written(x, weight.requires_grad_()), of_one_device, strict=True):
                assert_same(found, expected)


def test_a_recorded_write_after_strides_beyond_a_recorded_view_is_refused() -> None:
    mesh, values = Mesh((2,), ("x",)), rows(4, 4)
    for strides, is_beyond in (((2, 2), (4, 1), 4), False), (((2, 2), (4, 1), 3), True), (((1, 3), (1, 1), 5), True):
        for writes in (lambda x, view: view.mul_(2), lambda x, view: x[0].mul_(2)):
            with simulated(mesh):
                leaf = distribute(values, Layout(mesh, (Shard(0),))).requires_grad_()
                x = leaf * 1
                view = x[1:, :2].as_strided(*strides)
                (gradient,) = torch.autograd.grad(view.sum(), leaf)
                y = values.clone().requires_grad_()
                (expected,) = torch.autograd.grad((y * 1)[1:, :2].as_strided(*strides).sum(), y)
                assert_same(gradient, expected)
                if is_beyond:
                    with pytest.raises(LayoutError, match="as_strided gave elements beyond the view"):
                        writes(x, view)
                else:
                    writes(x, view)


def test_complex_views_equal_one_device() -> None:
    mesh = Mesh((3,), ("x",))
    value = torch.complex(rows(4, 3), rows(3, 4).t())
    with simulated(mesh):
        x = distribute(value, parse_layout("x:S(1)", mesh))
        assert_same(x.conj(), value.conj().resolve_conj())
        assert_same(x.conj().imag, value.conj().imag.resolve_neg())
        assert_same(torch.view_as_real(x), torch.view_as_real(value))


def _add_to_a_row(x: Any) -> Any:
    x[1].add_(10)
    return x.clone()


def _read_a_row_after_its_base_was_written(x: Any) -> Any:
    y = x[1]
    x.mul_(2)
    return y.clone()


def _write_through_a_view_of_a_view(x: Any) -> Any:
    y = x[1]
    z = y[2:]
    z.mul_(3)
    x.add_(1)
    y[0] = 5
    return torch.cat([x.reshape(-1), y, z])


def _write_both_ways(x: Any) -> Any:
    y = x[1:3]
    z = y[:, 0]
    z.fill_(7)
    x[2, 0] = 1
    return torch.cat([x.reshape(-1), y.reshape(-1), z])


def _write_one_view_and_read_another(x: Any) -> Any:
    y = x[:, 1]
    x[0] += 100
    row = x[0]
    row *= 2
    return torch.cat([x.reshape(-1), y, row])


def _write_pieces(x: Any) -> Any:
    a, b = x.unbind(0)[:2]
    a += b
    x[3, 3] = 0
    return torch.cat([x.reshape(-1), a, b])


@pytest.mark.parametrize(
    ("program", "shape"),
    one_way_each(
        [
            _add_to_a_row,
            _read_a_row_after_its_base_was_written,
            _write_through_a_view_of_a_view,
            _write_both_ways,
            _write_one_view_and_read_another,
            _write_pieces,
        ],
        [(4,), (2, 2), (3,)],
    ),
)
def test_views_and_their_base_are_one_tensor(program: Function, shape: tuple[int, ...]) -> None:
    x = rows(4, 5)
    for layout in layouts_of(x, Mesh(shape)):
        with simulated(Mesh(shape)):
            found = whole(program(distribute(x, layout)))

        assert torch.allclose(found, program(x.clone())), layout


def test_a_view_taken_before_its_base_changes_its_shape_in_place() -> None:
    mesh = Mesh((2, 2), ("x", "y"))
    with simulated(mesh):
        x = distribute(torch.arange(8.0).view(1, 8), Layout(mesh, (Shard(1), Partial())))
        part = x[:, :3]
        x.squeeze_(0)

        assert whole(x).equal(torch.arange(8.0))
        assert whole(part).equal(torch.arange(3.0).view(1, 3))


@pytest.mark.parametrize("layout", ["x:R y:P(sum)", "x:P(sum) y:P(sum)", "x:S(0) y:P(sum)", "x:S(1) y:S(0)"])
def test_a_number_copied_into_a_tensor_is_its_value(layout: str) -> None:
    """Not that of each rank's term: a sum of terms would count it once for each rank."""
    mesh = Mesh((2, 2), ("x", "y"))
    with simulated(mesh):
        x = distribute(rows(5, 3), parse_layout(layout, mesh))
        x.copy_(2)
        assert str(x.layout) == layout
        assert_same(x, torch.full((5, 3), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("placements", list(itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)))
def test_views_in_inference_mode_are_those_of_one_device(placements: tuple[Any, ...]) -> None:
    def run(x: Any) -> list[Any]:
        with torch.inference_mode():
            views = [x.t(), x[1:3], *x.split(3), x.view(-1)[3:9], *x.unbind(1)]
            x.t()[1] = 2.0
            x[1:3].mul_(3)
        with torch.no_grad():
            views[1].add_(1)  # not of inference, as x is not
        return [x, *views, x @ x.t()]

    value = torch.arange(20.0).view(4, 5)
    mesh = Mesh((2, 2), ("dp", "tp"))
    with simulated(mesh):
        ours = run(distribute(value, Layout(mesh, placements)))
        for mine, theirs in zip(ours, run(value.clone()), strict=True):
            assert mine.is_inference() == theirs.is_inference()
            torch.testing.assert_close(whole(mine), theirs)
