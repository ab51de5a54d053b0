"""A process group on CPU tensors that keeps NCCL's contract: its refusals, and its asynchronous results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.core.transforms import unwrapped
from dshard.core.trees import replace_tensors
from dshard.tools.nccl_contract import transfers
from dshard.tools.nccl_contract.communicator_group import CommunicatorGroup
from dshard.tools.nccl_contract.contract_rules import (
    check_overlap,
    check_peer,
    check_reduction,
    check_root,
    check_tensors,
    reduction_name,
    refuse,
)
from dshard.tools.nccl_contract.operation import Bytes, Digest, Entry, Message


class NcclContract(CommunicatorGroup):
    """A process group that refuses what NCCL refuses, and whose results are invalid until they are waited for.

    It has the methods of torch's own process groups, and is made by `init_process_group` and `new_group`.
    """

    # -- collectives

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Terms -> their reduction, in place."""
        return self._begin("all_reduce", [self._all_reduce(x, _op(opts)) for x in _listed(tensors)])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Several all_reduces as one."""
        return self._begin("all_reduce_coalesced", [self._all_reduce(x, _op(opts)) for x in tensors])

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp) -> Entry:
        check_tensors("all_reduce", [x], as_real=True)
        check_reduction("all_reduce", x.dtype, op)

        def run(read: list[Bytes]) -> list[Bytes]:
            return [transfers.reduce(transfers.gather(self._gloo, read[0], self.size()), x.dtype, op)]

        return Entry(_call("all_reduce", x, reduction_name(op)), [x], [x], run)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Terms -> their reduction on the root, in place."""
        (x,), op, root = tensors, _op(opts), opts.rootRank
        check_tensors("reduce", [x], as_real=True)
        check_reduction("reduce", x.dtype, op)
        check_root("reduce", root, self.size())

        def run(read: list[Bytes]) -> list[Bytes]:
            terms = transfers.gather(self._gloo, read[0], self.size())
            return [transfers.reduce(terms, x.dtype, op)] if self.rank() == root else []

        return self._begin(
            "reduce", [Entry(_call("reduce", x, reduction_name(op), root), [x], [x] * (self.rank() == root), run)]
        )

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = 0, timeout: Any = None) -> dist.Work:
        """The root's tensor, on all ranks."""
        (x,), root = _listed(tensors), opts if isinstance(opts, int) else opts.rootRank
        check_tensors("broadcast", [x], as_real=True)
        check_root("broadcast", root, self.size())
        sends = self.rank() == root

        def run(read: list[Bytes]) -> list[Bytes]:
            data = read[0] if sends else torch.empty(x.numel() * x.element_size(), dtype=torch.uint8)
            out = transfers.broadcast(self._gloo, data, root)
            return [] if sends else [out]

        return self._begin("broadcast", [Entry(_call("broadcast", x, root), [x] * sends, [x] * (not sends), run)])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """One tensor of one size -> those of all ranks, in one tensor."""
        return self._begin("all_gather_into_tensor", [self._gather_into(output, input)])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Several all_gathers as one."""
        parts = [self._gather_into(out, x) for out, x in zip(outputs, inputs, strict=True)]
        return self._begin("all_gather_into_tensor_coalesced", parts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_into(self, out: Tensor, x: Tensor) -> Entry:
        what = "all_gather_into_tensor"
        check_tensors(what, [x, out])
        if out.numel() != self.size() * x.numel():
            refuse("gathered_size", f"{what} of {x.numel()} elements into {out.numel()} on {self.size()} ranks")
        check_overlap(what, x, out, self.rank() * x.numel())

        def run(read: list[Bytes]) -> list[Bytes]:
            return [torch.cat(transfers.gather(self._gloo, read[0], self.size()))]

        return Entry(_call(what, x), [x], [out], run)

    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """The tensors of all ranks, in a list. Their sizes may differ: torch then broadcasts each."""
        (outs,), (x,) = output_lists, inputs
        check_tensors("all_gather", [x, *outs])
        if len(outs) != self.size() or outs[self.rank()].numel() != x.numel():
            refuse("gathered_size", f"all_gather of {x.numel()} elements into {[out.numel() for out in outs]}")
        for out in outs:
            check_overlap("all_gather", x, out)
        sizes = tuple(out.numel() * out.element_size() for out in outs)

        def run(read: list[Bytes]) -> list[Bytes]:
            return transfers.exchange(self._gloo, read * self.size(), sizes)

        call = Digest(("all_gather", str(x.dtype), sizes))
        return self._begin("all_gather", [Entry(call, [x], outs, run)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Terms for all ranks in one tensor -> the reduction of this rank's piece; all of one size."""
        return self._begin("reduce_scatter_tensor", [self._scatter_from(output, input, _op(opts))])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several reduce_scatters as one."""
        parts = [self._scatter_from(out, x, _op(opts)) for out, x in zip(outputs, inputs, strict=True)]
        return self._begin("reduce_scatter_tensor_coalesced", parts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_from(self, out: Tensor, x: Tensor, op: dist.ReduceOp) -> Entry:
        what = "reduce_scatter_tensor"
        check_tensors(what, [x, out])
        check_reduction(what, x.dtype, op)
        if x.numel() != self.size() * out.numel():
            refuse("scattered_size", f"{what} of {x.numel()} elements into {out.numel()} on {self.size()} ranks")
        check_overlap(what, x, out, -self.rank() * out.numel())
        sizes = [out.numel() * out.element_size()] * self.size()
        run = partial(self._run_scatter, sizes, x.dtype, op)
        return Entry(_call(what, x, reduction_name(op)), [x], [out], run)

    def _run_scatter(self, sizes: list[int], dtype: torch.dtype, op: dist.ReduceOp, read: list[Bytes]) -> list[Bytes]:
        terms = transfers.exchange(self._gloo, torch.cat(read).split(sizes), [sizes[self.rank()]] * self.size())
        return [transfers.reduce(terms, dtype, op)]

    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Terms for each rank -> the reduction of this rank's. Their sizes may differ: torch then reduces each."""
        (out,), (terms,), op = outputs, input_lists, _op(opts)
        check_tensors("reduce_scatter", [out, *terms])
        check_reduction("reduce_scatter", out.dtype, op)
        if len(terms) != self.size() or terms[self.rank()].numel() != out.numel():
            refuse("scattered_size", f"reduce_scatter of {[x.numel() for x in terms]} elements into {out.numel()}")
        sizes = [x.numel() * x.element_size() for x in terms]
        run = partial(self._run_scatter, sizes, out.dtype, op)
        call = Digest(("reduce_scatter", str(out.dtype), tuple(sizes), reduction_name(op)))
        return self._begin("reduce_scatter", [Entry(call, terms, [out], run)])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Pieces for each rank in one tensor -> pieces from each rank in one; their sizes may differ."""
        check_tensors("all_to_all_single", [input, output])
        check_overlap("all_to_all_single", input, output, -1)
        send, receive = self._splits(input, input_split_sizes), self._splits(output, output_split_sizes)

        def run(read: list[Bytes]) -> list[Bytes]:
            return [torch.cat(transfers.exchange(self._gloo, read[0].split(list(send)), receive))]

        call = Digest(("all_to_all_single", str(input.dtype)), send, receive)
        return self._begin("all_to_all_single", [Entry(call, [input], [output], run)])

    alltoall_base = all_to_all_single

    def _splits(self, x: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of the pieces of `x` along its first dim."""
        rows = x.shape[0] if x.ndim else 1
        if not (sum(sizes) == rows and len(sizes) == self.size() if sizes else rows % self.size() == 0):
            refuse("split_sizes", f"all_to_all_single of {rows} rows in {list(sizes) or self.size()} pieces")
        nbytes = x.numel() * x.element_size() // rows if rows else 0
        return tuple(size * nbytes for size in (sizes or [rows // self.size()] * self.size()))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """A tensor for each rank -> one from each; their sizes may differ."""
        check_tensors("all_to_all", [*inputs, *outputs])
        send, receive = (tuple(x.numel() * x.element_size() for x in xs) for xs in (inputs, outputs))
        if len(inputs) != self.size() or len(outputs) != self.size():
            refuse("split_sizes", f"all_to_all of {len(inputs)} into {len(outputs)} tensors on {self.size()} ranks")

        def run(read: list[Bytes]) -> list[Bytes]:
            return transfers.exchange(self._gloo, read, receive)

        return self._begin(
            "all_to_all", [Entry(Digest(("all_to_all", str(inputs[0].dtype)), send, receive), inputs, outputs, run)]
        )

    # -- torch's kernels for symmetric memory: there they run on the current stream, so a result needs no wait, but here
    # they are operations of the communicator, whose order all ranks must keep

    def fused_all_gather_matmul(
        self, a: Tensor, bs: list[Tensor], dim: int, *, return_a: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Gather the chunks of `a` along `dim`, and multiply them by each matrix."""
        first = a if dim == a.ndim - 1 else a.movedim(dim, 0)
        chunk = first.flatten(0, -2)
        aligned = chunk.is_contiguous() and not any(n % 16 for n in (a.storage_offset() * a.itemsize, a.nbytes))
        if a.ndim < 2 or any((b.ndim, b.dtype) != (2, a.dtype) for b in bs) or not aligned:
            refuse(
                "fused", f"the product of a chunk of shape {tuple(a.shape)} and strides {a.stride()} along dim {dim}"
            )
        gathered = chunk.new_empty(self.size() * chunk.shape[0], chunk.shape[1])
        self._begin("fused_all_gather_matmul", [self._gather_into(gathered, chunk)]).wait()
        chunks = gathered.view(self.size(), *first.shape)
        whole = torch.cat(chunks.unbind(), -1) if first is a else chunks.flatten(0, 1)
        back = 0 if first is a else dim
        return whole.movedim(0, back) if return_a else None, [(whole @ b).movedim(0, back) for b in bs]

    def fused_matmul_reduce_scatter(self, a: Tensor, b: Tensor, op: str, dim: int) -> Tensor:
        """Multiply, and reduce-scatter the product along `dim`."""
        if a.ndim < 2 or (b.ndim, b.dtype) != (2, a.dtype) or (*a.shape[:-1], b.shape[1])[dim] % self.size():
            refuse("fused", f"a product of shapes {tuple(a.shape)} and {tuple(b.shape)}, scattered along dim {dim}")
        terms = (a @ b).movedim(dim, 0).contiguous()
        out = terms.new_empty(terms.shape[0] // self.size(), *terms.shape[1:])
        reduction = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[op]
        self._begin("fused_matmul_reduce_scatter", [self._scatter_from(out, terms, dist.ReduceOp(reduction))]).wait()
        return out.movedim(0, dim).contiguous()

    def gather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """A tensor of one size on all ranks -> all of them on the root."""
        (x,), root = inputs, opts.rootRank
        outs = output_lists[0] if output_lists and self.rank() == root else []
        check_tensors("gather", [x, *outs])
        check_root("gather", root, self.size())
        if any(out.numel() != x.numel() for out in outs):
            refuse("gathered_size", f"gather of {x.numel()} elements into {[out.numel() for out in outs]}")

        def run(read: list[Bytes]) -> list[Bytes]:
            return transfers.gather(self._gloo, read[0], self.size())[: len(outs)]

        return self._begin("gather", [Entry(_call("gather", x, root), [x], outs, run)])

    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> dist.Work:
        """A tensor of one size for each rank on the root -> one on each."""
        (out,), root = outputs, opts.rootRank
        pieces = input_lists[0] if input_lists and self.rank() == root else []
        check_tensors("scatter", [out, *pieces])
        check_root("scatter", root, self.size())
        if any(x.numel() != out.numel() for x in pieces):
            refuse("scattered_size", f"scatter of {[x.numel() for x in pieces]} elements into {out.numel()}")
        nbytes = out.numel() * out.element_size()

        def run(read: list[Bytes]) -> list[Bytes]:
            send = read or [torch.empty(0, dtype=torch.uint8)] * self.size()
            sizes = [nbytes if rank == root else 0 for rank in range(self.size())]
            return [transfers.exchange(self._gloo, send, sizes)[root]]

        return self._begin("scatter", [Entry(_call("scatter", out, root), pieces, [out], run)])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait on the host for all ranks, by an all_reduce of one element."""
        x = torch.empty(1, dtype=torch.uint8)
        part = Entry(Digest(("barrier",)), [], [], lambda read: transfers.gather(self._gloo, x, self.size())[:0])
        return self._begin("barrier", [part], stops_host=True)

    def monitored_barrier(self, *args: object, **kwargs: object) -> None:
        """Refuse: gloo alone has it."""
        refuse("unsupported", "monitored_barrier", RuntimeError)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Refuse: NCCL has no receives from any rank."""
        refuse("unsupported", "recv from any rank", RuntimeError)

    # -- messages, and groups of them

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send to a rank of the group; tags are ignored."""
        return self._message("send to", tensors, peer, sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive from a rank of the group; tags are ignored."""
        return self._message("recv from", tensors, peer, sends=False)

    def _message(self, verb: str, tensors: list[Tensor], peer: int, *, sends: bool) -> dist.Work:
        (x,) = tensors
        check_peer(verb, peer, self.rank(), self.size())
        what = f"{verb} rank {self._ranks[peer]}"
        check_tensors(what, [x], message=True)
        message = Message(sends, self.size(), peer, x.numel() * x.element_size(), str(x.dtype))
        return self._begin(what, [Entry(None, [x] * sends, [x] * (not sends), message=message)], peer=peer)

    def _start_coalescing(self, device: torch.device) -> None:
        if self._group is not None:
            refuse("coalescing", "a group within a group", RuntimeError)
        self._group = []

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        parts, self._group = self._group, None
        if parts is None:
            refuse("coalescing", "the end of a group that has not begun", RuntimeError)
        kinds = {part.message is not None for part in parts}
        if len(kinds) > 1:
            refuse("coalescing", "a group of messages and collectives", RuntimeError)
        return self._begin("group of messages" if True in kinds else "group of collectives", parts) if parts else None


def _listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _op(opts: Any) -> dist.ReduceOp:
    if opts is None:
        return dist.ReduceOp(dist.ReduceOp.SUM)
    op: dist.ReduceOp = getattr(opts, "reduceOp", opts)
    return op


def _call(kind: str, x: Tensor, *others: object) -> Digest:
    return Digest((kind, str(x.dtype), x.numel(), *others))


def _unwrapping(method: Any) -> Any:
    """A method that is given what transforms of torch.func have wrapped, as c10d's dispatcher gives it."""

    @wraps(method)
    def call(group: NcclContract, *args: object, **kwargs: object) -> object:
        args, kwargs = replace_tensors((args, kwargs), unwrapped)
        return method(group, *args, **kwargs)

    return call


for _name, _method in [*vars(NcclContract).items()]:
    if isinstance(_method, FunctionType) and not _method.__name__.startswith("_"):
        setattr(NcclContract, _name, _unwrapping(_method))
