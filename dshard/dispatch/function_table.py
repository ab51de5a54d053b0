"""The functions of torch that `__torch_function__` handles itself: a row for each, and their handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import mkldnn

from dshard.autograd.crossing import redistribute
from dshard.autograd.gathered_weights import stored_part
from dshard.autograd.gradients import (
    accumulating,
    data,
    gradients,
    register_hook,
    register_post_accumulate_grad_hook,
    retain_grad,
    set_data,
)
from dshard.callers import asked_by
from dshard.comm import (
    COLLECTIVES_OF_TORCH,
    begin_backward,
    is_absent,
    is_own,
    kernel_device,
    numbers_of,
    of_first_rank,
    ranks_of_group,
)
from dshard.core.call import OperatorForm
from dshard.core.comparisons import with_comparisons
from dshard.core.moves import redistribute_local
from dshard.core.plain_tensors import is_of_whole, wrap_or_refuse_plain
from dshard.core.saved_files import refuse_safetensors
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import bind_arguments, call_torch, without_asking
from dshard.core.torch_wrappers import refuse_collective
from dshard.core.trees import replace_leaves, tensors_in
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.layout import replicated
from dshard.ops.attention.attention_call import attention, attention_form, multi_head_attention
from dshard.ops.attention.flex import flex_attention_operator
from dshard.ops.custom import accept_call, wrapped
from dshard.ops.embedding import embedding, embedding_bag, embedding_bag_form, embedding_form
from dshard.ops.fused_loss.fused_call import (
    fused_form,
    linear_cross_entropy,
    own_linear_cross_entropy,
    torch_linear_cross_entropy,
)
from dshard.ops.losses import cross_entropy, cross_entropy_form, ctc_loss, of_bytes
from dshard.ops.matmul.functions import addmm, bmm, einsum, linear, matmul, operator_form, rmatmul
from dshard.ops.norms import batch_norm, rms_norm, rms_norm_form
from dshard.ops.pointwise import nonlinear_names
from dshard.ops.ragged import (
    index_parts,
    masked_select,
    pack_padded_sequence,
    pad_packed_sequence,
    pad_sequence,
    without_masks,
)
from dshard.ops.views import GIVE_OTHER_DIMS, as_strided, with_other_dims
from dshard.rules.strategy import completed_layout
from dshard.torch_private import (
    DispatchKey,
    decomposition_table,
    has_compatible_shallow_copy_type,
    is_key_excluded,
    is_transforming,
    no_torch_function,
    run_backward,
    torch_pack,
    torch_pad,
    torch_pad_sequence,
)


def getitem(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`x[index]` and `x[index] = value`; torch reads lists of positions, but none of distributed ones.

    Masks are converted to indices here, once for the forward and the backward pass, unless one value fills all places.
    """
    x, index, *value = args
    parts = index_parts(index)
    if any(isinstance(part, tuple | list) and tensors_in(part) for part in parts):
        index = tuple(_with_numbers([*part]) if isinstance(part, tuple | list) else part for part in parts)
    if not value or (isinstance(value[0], Tensor) and value[0].numel() != 1):
        index = without_masks(x, index)
    return call_torch(func, (x, index, *value), kwargs)


def _with_numbers(tree: object) -> Any:
    """`tree` with numbers in place of its distributed tensors."""
    return replace_leaves(tree, lambda leaf: tolist(Tensor.tolist, (leaf,), {}) if isinstance(leaf, Wrapper) else leaf)


def reduce_partials_first(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a nonlinear function with partial operands completed, once for the forward and the backward pass.

    Operands stay partial if the function may write to them, as with `inplace`.
    """
    if not any(map(_is_partial, args)) or kwargs.get("inplace") or any(arg is True for arg in args):
        return NotImplemented
    accept_call(func, args, kwargs)  # torch may refuse the arguments: before anything is sent
    return func(*(_reduce_partials(func, arg) if _is_partial(arg) else arg for arg in args), **kwargs)


def reduce_partial_sources_first(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call an operator in place with its partial operands completed, but for the one that it writes."""
    if not any(map(_is_partial, args[1:])):
        return NotImplemented
    accept_call(func, args, kwargs)
    return func(args[0], *(_reduce_partials(func, arg) if _is_partial(arg) else arg for arg in args[1:]), **kwargs)


def _is_partial(x: object) -> bool:
    return isinstance(x, Wrapper) and x._spec.has_partial


def or_reduce_partials_first(handler: Function) -> Function:
    """`handler`, with `reduce_partials_first` for calls for which it returns None."""

    def handle(func: Function, args: Args, kwargs: Kwargs) -> Any:
        out = handler(func, args, kwargs)
        return reduce_partials_first(func, args, kwargs) if out is None else out

    return handle


def _reduce_partials(func: Function, x: Wrapper) -> Wrapper:
    return redistribute(x, completed_layout(x._spec.layout), func.__name__, as_operand=True)


def dropout(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`F.dropout` with a partial operand completed, unless it drops nothing and so returns the operand itself."""
    _, p, training, _ = bind_arguments(("input", "p", "training", "inplace"), args, kwargs)
    if training is False or p == 0:
        return NotImplemented
    return reduce_partials_first(func, args, kwargs)


def tensor_split(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.tensor_split`; indices in a distributed tensor are gathered, as torch reads them from memory."""
    name = "tensor_indices_or_sections"  # numbers are called otherwise
    sections = args[1] if len(args) > 1 else kwargs.get(name)
    if not isinstance(sections, Tensor) or sections.dtype != torch.int64:
        return call_torch(func, args, kwargs)
    x, _, dim = bind_arguments(("input", name, "dim"), args, kwargs)
    whole = of_first_rank(sections.full_tensor()) if isinstance(sections, Wrapper) else sections
    return call_torch(torch.tensor_split, (x, numbers_of(whole), 0 if dim is None else dim), {})


def tolist(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`tolist`: the numbers of the global tensor, equal on every rank."""
    [x] = args
    return numbers_of(of_first_rank(x.full_tensor()))


def python_number(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`float` and the like of elements of `torch.tensor([loss, ...])`, within which torch runs no Python kernel."""
    [x] = args
    if not is_key_excluded(DispatchKey.Python):
        return NotImplemented
    layout = replicated(x._spec.layout.mesh)
    return func(of_first_rank(redistribute_local(x._local_tensor, x._spec, layout, func.__name__)))


def new_of_numbers(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`x.new_tensor([loss, ...])` with the distributed numbers read first: torch runs no Python kernel within it."""

    def read(given: object) -> Any:
        return _with_numbers(given) if type(given) in (list, tuple) else given

    x, *rest = args
    new = func(x, *map(read, rest), **{name: read(given) for name, given in kwargs.items()})
    return wrapped(new, x)


def recurrent(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.lstm` and the like; batch sizes of packed sequences stay plain, as torch reads them from memory.

    Torch's fused LSTM of oneDNN is switched off: it cannot be sharded, and exists only on CPUs in single and half
    precision, so a plan, made on meta tensors, would be of other operators than the call. So would it be by cuDNN, or
    by the fused cells of GPUs: there torch's decomposition runs the operators of the plan.
    """
    sizes = args[1]
    is_packed = isinstance(sizes, Tensor) and not sizes.is_floating_point()
    numbers = ((of_first_rank(sizes._local_tensor) if isinstance(sizes, Wrapper) else sizes),) if is_packed else ()
    rest, kwargs = wrap_or_refuse_plain(func, (args[0], *args[1 + len(numbers) :]), kwargs)
    if kernel_device(rest[0].device) not in ("cpu", "meta"):
        func = decomposition_table[getattr(getattr(torch.ops.aten, func.__name__), "data" if is_packed else "input")]
    enabled, *_ = mkldnn.set_flags(False, _fp32_precision=None)
    try:
        return call_torch(func, (rest[0], *numbers, *rest[1:]), kwargs)
    finally:
        mkldnn.set_flags(enabled, _fp32_precision=None)


def memory_of_value(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`numpy` and DLPack of the global tensor: the memory of a replicated one, else a copy, which numpy may not write.

    A write to the memory of a replicated tensor is one on this rank, and seen by it, as in torch.
    """
    x, *rest = args
    is_shared = x._spec.layout.is_replicated() and not is_absent(x._local_tensor, x._spec.layout.mesh)
    if not is_shared:  # torch refuses what it would refuse of the global tensor, before anything is sent
        func(torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad), *rest, **kwargs)
    value = of_first_rank(x._local_tensor if is_shared else x.detach().full_tensor())
    out = func(value.detach().requires_grad_(x.requires_grad), *rest, **kwargs)
    if not is_shared and func is not Tensor.__dlpack__:
        out.flags.writeable = out.flags.owndata  # which an array of another dtype does
    return out


def collective(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A collective of torch's on distributed tensors: refused between ranks of their mesh, but for whole numbers."""
    distributed = [x for x in tensors_in((args, kwargs)) if isinstance(x, Wrapper)]
    layout, ranks = distributed[0]._spec.layout, ranks_of_group((*args, *kwargs.values()))
    if is_of_whole(func.__name__, [x._spec.layout for x in distributed], ranks):
        args, kwargs = replace_leaves((args, kwargs), lambda x: x._local_tensor if isinstance(x, Wrapper) else x)
    else:
        refuse_collective(func.__name__, ranks, layout)
        args, kwargs = wrap_or_refuse_plain(func, args, kwargs)
    with no_torch_function():
        return func(*args, **kwargs)


_COMPARE_POINTERS = ("accelerate", "safetensors", "torch", "transformers")
"""Libraries that tell by their memory whether tensors are one: to them, all distributed ones are at 0."""


def data_ptr(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`data_ptr`: that of a replicated tensor on this rank; others are refused, but for code of `_COMPARE_POINTERS`."""
    if asked_by(*_COMPARE_POINTERS, through=("dshard",)):
        return NotImplemented
    local, layout = args[0]._local_tensor, args[0]._spec.layout
    if layout.is_replicated() and is_own(local):
        return local.data_ptr()
    raise LayoutError(
        f"data_ptr() of a tensor laid out [{layout}], which is in no one's memory as a whole: "
        "x.to_local().data_ptr() is the address of what this rank holds, x.full_tensor() gathers it"
    )


def storage(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`storage`: refused to safetensors, which looks there for tensors that share memory, before it writes or reads."""
    if asked_by("safetensors", through=("dshard", "torch")):
        refuse_safetensors(args[0]._spec)
    return NotImplemented


def share_memory(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`share_memory_`: of the local tensor, where this rank has one; torch's own would crash."""
    x = args[0]
    local = x._local_tensor
    if is_own(local):
        func(local)
    return x


def keeping_torch_function(function: Function) -> Function:
    """A copy of `torch.autograd.backward` or `grad` that leaves `__torch_function__` on for activation checkpoints.

    A handler usually calls its function with `__torch_function__` disabled, to avoid recursion; but operators that a
    checkpoint recomputes in the backward pass must reach `__torch_function__`. So the copy itself skips the protocol,
    for its operands and for its gradients. Torch's own function is unchanged.
    """
    return without_asking(function, _make_grads=with_torch_function_off(function.__globals__.get("_make_grads")))


def with_torch_function_off(function: Any) -> Function:
    """`function` run with `__torch_function__` disabled."""

    def run(*args: object, **kwargs: object) -> Any:
        with no_torch_function():
            return function(*args, **kwargs)

    return run


_backward, _grad = keeping_torch_function(torch.autograd.backward), keeping_torch_function(torch.autograd.grad)


def backward(func: Function, args: Args, kwargs: Kwargs) -> None:
    """`Tensor.backward`, which is `torch.autograd.backward` of one tensor."""
    _backward_of(*args, **kwargs)


def _backward_of(
    x: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: object = None,
) -> None:
    create_graph = bool(create_graph)
    if inputs is None and _is_gradient_of(x, gradient) and not is_transforming():  # nothing is left to check
        retained = create_graph if retain_graph is None else retain_graph
        run_backward((x,), (gradient,), retained, create_graph, (), allow_unreachable=True, accumulate_grad=True)
    else:
        accumulating(_backward, (x, gradient, retain_graph, create_graph), {"inputs": inputs})


def _is_gradient_of(x: Tensor, gradient: Tensor | None) -> bool:
    """Whether `gradient` is a distributed tensor of the shape and dtype of the distributed tensor `x`."""
    if type(gradient) is not Wrapper.public or type(x) is not Wrapper.public:
        return False
    spec, of_gradient = x._spec, gradient._spec
    return spec.shape == of_gradient.shape and spec.dtype is of_gradient.dtype


def backward_of_many(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.backward`."""
    return accumulating(_backward, args, kwargs)


def grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.grad`."""
    for x in tensors_in(kwargs.get("grad_outputs", args[2:3])):
        begin_backward(x._local_tensor if isinstance(x, Wrapper) else x)
    return gradients(_grad, args, kwargs)


def have_public_type(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether both tensors are distributed, and so may take each other's place.

    Asked by `module.to`, which then assigns to `data`, as it does of plain parameters: torch does not swap tensors that
    something holds weakly, and what it would swap of a gathered weight is its graph.
    """
    x, other = args
    if not (type(x) is type(other) is Wrapper.public):
        return False
    if x.grad_fn is not None and x.dtype is not other.dtype and stored_part(x) is not None:
        raise LayoutError(
            f"module.to({other.dtype}) in a forward pass, of a weight that is gathered for it in {x.dtype}, as its "
            f"gradient is: convert the module before the step, by module.to({other.dtype})"
        )
    with no_torch_function():
        other._is_assigned = func(x, other) and not torch.__future__.get_overwrite_module_params_on_conversion()
    return True


_T: Any = Tensor


class FunctionRow(NamedTuple):
    """The handler that runs in place of a function of torch whose operands are distributed.

    Attributes:
        handler: Called as `handler(func, args, kwargs)`.
        when: Of a "composite" `__torch_function__` is off, plain operands are distributed, and NotImplemented leaves
            the call to torch's function; one that is its "own" switches that off itself; one "with plain" operands
            decides on these, too.
        rewrites: Whether it calls other functions, whose plans are cheaper, with `__torch_function__` on.
        is_backward: Whether it runs a backward pass.
        form: The call of global tensors as one operator, for whoever plans a whole step; None or NotImplemented for a
            call that is to be planned as the operators that torch runs.
    """

    handler: Function
    when: Literal["composite", "own", "with plain"] = "composite"
    rewrites: bool = False
    is_backward: bool = False
    form: Callable[[Args, Kwargs], OperatorForm | None] | None = None


def _or_form(handler: Function, form: Function) -> FunctionRow:
    """The row of a handler that gives its call to a function `run`, of which `form` makes one operator."""
    return FunctionRow(handler, form=partial(handler, None, run=form))


def _rows(row: FunctionRow, *functions: object) -> dict[object, FunctionRow]:
    return dict.fromkeys(functions, row)


def _of_names(row: FunctionRow, names: Iterable[str], *modules: object) -> dict[object, FunctionRow]:
    """The row for the functions of these names that the modules have."""
    functions = (getattr(module, name, None) for module in modules for name in names)
    return {function: row for function in functions if function is not None}


QUERY = FunctionRow(call_torch)
"""The row of queries that torch answers of any tensor, and that raise nothing."""
_COMPLETED = FunctionRow(reduce_partials_first)
_ALONG_DIMS = ("softmax", "log_softmax", "logsigmoid", "glu", "hardswish", "layer_norm", "group_norm", "normalize")
"""Nonlinear functions that are no elementwise operators of one tensor to torch."""

FUNCTIONS: dict[object, FunctionRow] = {
    **_of_names(_COMPLETED, (*nonlinear_names({*vars(torch), *vars(F)}), *_ALONG_DIMS), torch, Tensor, F),
    # Their gradients look for the results among the operands: a sum that is reduced twice may be rounded in two ways.
    **_of_names(_COMPLETED, ("index_reduce", "scatter_reduce"), torch, Tensor),
    **_rows(FunctionRow(reduce_partial_sources_first), _T.index_reduce_, _T.scatter_reduce_),
    **_rows(_or_form(matmul, operator_form), torch.matmul, torch.mm, _T.mm, _T.matmul, _T.__matmul__),
    **_rows(FunctionRow(rmatmul), _T.__rmatmul__),
    **_rows(_or_form(addmm, operator_form), torch.addmm, _T.addmm),
    **_rows(FunctionRow(bmm, form=partial(matmul, torch.matmul, run=operator_form)), torch.bmm, _T.bmm),
    **_rows(_or_form(einsum, operator_form), torch.einsum, torch.functional.einsum),
    F.linear: _or_form(linear, operator_form),
    F.scaled_dot_product_attention: FunctionRow(attention, form=attention_form),
    torch.ops.higher_order.flex_attention: FunctionRow(flex_attention_operator),
    F.multi_head_attention_forward: FunctionRow(multi_head_attention, "with plain", rewrites=True),
    F.embedding: FunctionRow(embedding, form=embedding_form),
    F.embedding_bag: FunctionRow(embedding_bag, form=embedding_bag_form),
    F.nll_loss: FunctionRow(of_bytes),
    F.cross_entropy: FunctionRow(or_reduce_partials_first(cross_entropy), form=cross_entropy_form),
    **_of_names(_or_form(torch_linear_cross_entropy, fused_form), ("linear_cross_entropy",), F),
    linear_cross_entropy: _or_form(own_linear_cross_entropy, fused_form)._replace(when="with plain"),
    F.ctc_loss: FunctionRow(ctc_loss),
    F.rms_norm: FunctionRow(or_reduce_partials_first(rms_norm), form=rms_norm_form),
    F.batch_norm: FunctionRow(batch_norm),
    F.dropout: FunctionRow(dropout),
    **_rows(FunctionRow(recurrent, "with plain"), torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    torch_pack: FunctionRow(pack_padded_sequence, "with plain", rewrites=True),
    torch_pad: FunctionRow(pad_packed_sequence, "with plain", rewrites=True),
    torch_pad_sequence: FunctionRow(pad_sequence, "with plain", rewrites=True),
    **_rows(FunctionRow(masked_select, "with plain", rewrites=True), torch.masked_select, _T.masked_select),
    **_rows(FunctionRow(tensor_split), torch.tensor_split, _T.tensor_split),
    **_rows(FunctionRow(with_other_dims), *GIVE_OTHER_DIMS),
    **_rows(FunctionRow(as_strided), torch.as_strided, _T.as_strided),
    **_rows(FunctionRow(getitem), _T.__getitem__, _T.__setitem__),
    **_of_names(FunctionRow(python_number), ("__float__", "__int__", "__index__", "__bool__", "__complex__"), Tensor),
    _T.tolist: FunctionRow(tolist),
    **_rows(FunctionRow(new_of_numbers), _T.new_tensor, _T.new),
    **_rows(FunctionRow(memory_of_value), _T.numpy, _T.__array__, _T.__dlpack__),
    _T.share_memory_: FunctionRow(share_memory),
    _T.storage: FunctionRow(storage),
    _T.data_ptr: FunctionRow(data_ptr),
    _T.data.__get__: FunctionRow(data),
    _T.data.__set__: FunctionRow(set_data, "own"),
    has_compatible_shallow_copy_type: FunctionRow(have_public_type, "own"),
    _T.register_hook: FunctionRow(register_hook, "own"),
    _T.register_post_accumulate_grad_hook: FunctionRow(register_post_accumulate_grad_hook, "own"),
    _T.retain_grad: FunctionRow(retain_grad, "own"),
    _T.backward: FunctionRow(partial(with_comparisons, backward), "own", is_backward=True),
    torch.autograd.backward: FunctionRow(partial(with_comparisons, backward_of_many), "own", is_backward=True),
    torch.autograd.grad: FunctionRow(partial(with_comparisons, grad), "own", is_backward=True),
    **_rows(FunctionRow(collective, "with plain"), *COLLECTIVES_OF_TORCH),
    **_rows(QUERY, _T.is_leaf.__get__, _T.requires_grad.__get__, torch.is_floating_point, torch.is_complex),
    **_rows(QUERY, _T.is_floating_point, _T.is_complex, _T.dim, _T.numel, _T.is_contiguous),
}
"""The functions of torch that do not simply run as torch's operators, each with its row."""
QUERIES = frozenset(function for function, row in FUNCTIONS.items() if row is QUERY)
