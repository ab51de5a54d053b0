"""torch's debugging helpers by their names: `CommDebugMode` and `visualize_sharding`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dshard.callers import asked_by
from dshard.comm import CommEvent, is_first_rank, listen, tell_waits
from dshard.core.signature import Args, Kwargs
from dshard.placements import Placement
from dshard.tables import human_bytes, text_table
from dshard.tensor import DTensor
from dshard.tools.report.console import show, table
from dshard.tools.report.visualize import parts_of
from dshard.torch_private import OpOverload, TorchDispatchMode, graph_task_id
from dshard.trace import Trace, trace
from dshard.validate import check_type

__all__ = ["CommDebugMode", "tell_waits", "visualize_sharding"]

_OPS = torch.ops.c10d_functional
NAMES: dict[str, object] = {
    "all_gather": _OPS.all_gather_into_tensor,
    "reduce_scatter": _OPS.reduce_scatter_tensor,
    "all_reduce": _OPS.all_reduce,
    "all_to_all": _OPS.all_to_all_single,
    "exchange": _OPS.all_to_all_single,
    "broadcast": torch.ops.c10d.broadcast_,
    "scatter": torch.ops.c10d.scatter_,
}
"""The operators as which torch counts collectives; others keep dshard's name."""


_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
_NO_COLLECTIVES = frozenset(
    {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "send", "recv_", "recv_any_source_"}
)


class _Sent(TorchDispatchMode):
    """Counts the collectives that the program runs without dshard."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        packet = func.overloadpacket
        is_collective = func.namespace in ("c10d", *_FUNCTIONAL) and packet.__name__ not in _NO_COLLECTIVES
        if is_collective and not asked_by("dshard", through=("torch",)):
            self.counts[packet if func.namespace == "c10d" else getattr(_OPS, packet.__name__)] += 1
        return func(*args, **(kwargs or {}))


class CommDebugMode:
    """Counts the collectives within the block: those of dshard, by `dshard.trace`, and those of the program.

        with CommDebugMode() as comm:
            model(x).sum().backward()
        comm.get_comm_counts()[torch.ops.c10d_functional.all_reduce]

    The counts are by the operators that torch sends them with, most of them functional collectives; `comm.trace` has
    bytes, predicted seconds and lines of dshard's. One of dshard's counts once, however a backend carries it out. What
    the program sends by itself counts as in torch: by functional collectives, or by the operators of torch.distributed,
    such as `torch.ops.c10d.allreduce_`.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self._sent = _Sent()
        self._directions: list[str] = []
        self._stack = ExitStack()
        self._modules: dict[str, nn.Module] = {}
        self._paths: dict[nn.Module, str] = {}

    def __enter__(self) -> CommDebugMode:
        self._stack = ExitStack()
        self._modules, self._paths, self._directions = {}, {}, []
        self.trace = self._stack.enter_context(trace())
        self._stack.enter_context(listen(self._hear))
        self._sent = self._stack.enter_context(_Sent())
        self._stack.callback(register_module_forward_pre_hook(self._note).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _note(self, module: nn.Module, args: object) -> None:
        if module not in self._paths:
            self._paths |= {inner: path for path, inner in module.named_modules(prefix=type(module).__name__)}
        self._modules[self._paths[module]] = module

    def _hear(self, event: CommEvent) -> None:
        self._directions.append("forward" if graph_task_id() == -1 else "backward")

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[object, int]]]:
        """The number of each collective of dshard, "forward" and "backward", by path of the module, and "Global"."""
        counts: dict[str, dict[str, dict[object, int]]] = defaultdict(
            lambda: {"forward": defaultdict(int), "backward": defaultdict(int)}
        )
        for event, direction in zip(self.trace.events, self._directions, strict=True):
            names = event.module.split(".") if event.module else []
            for path in ("Global", *(".".join(names[: i + 1]) for i in range(len(names)))):
                counts[path][direction][NAMES.get(event.collective, event.collective)] += 1
        return counts

    @property
    def comm_counts(self) -> dict[object, int]:
        """The number of each collective that ran, as `get_comm_counts` gives it."""
        return self.get_comm_counts()

    def get_comm_counts(self) -> dict[object, int]:
        """The number of each collective that ran."""
        own: Counter[object] = Counter(NAMES.get(event.collective, event.collective) for event in self.trace.events)
        return defaultdict(int, own + self._sent.counts)

    def get_total_counts(self) -> int:
        """The number of collectives that ran."""
        return len(self.trace.events) + self._sent.counts.total()

    def get_parameter_info(self) -> dict[str, dict[str, Tensor]]:
        """The parameters of each module that ran, by its path and their names."""
        parameters = {path: dict(module.named_parameters(recurse=False)) for path, module in self._modules.items()}
        return {path: {name: p.data for name, p in own.items()} for path, own in parameters.items() if own}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of each distributed parameter, by its path."""
        return {
            f"{path}.{name}": p.placements
            for path, own in self.get_parameter_info().items()
            for name, p in own.items()
            if isinstance(p, DTensor)
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Tables by module: collectives at noise level 0, layouts of parameters from 1, all details from 2."""
        by_module: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for event in self.trace.events:
            key = event.module or "Global", event.collective
            by_module[key] += 1
            nbytes[key] += event.nbytes
        rows = [[*key, str(count), human_bytes(nbytes[key])] for key, count in by_module.items()]
        tables = [text_table(["module", "collective", "count", "received"], rows)]
        if noise_level >= 1:
            layouts = [[name, " ".join(map(str, placements))] for name, placements in self.get_sharding_info().items()]
            tables.append(text_table(["parameter", "placements"], layouts))
        if noise_level >= 2:
            tables.append(self.trace.summary())
        return "\n\n".join(tables)

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write that table to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n", encoding="utf-8")

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the events to a file as JSON, and from noise level 1 the placements of the parameters."""
        data = json.loads(self.trace.to_json())
        if noise_level >= 1:
            data["sharding"] = {name: list(map(str, p)) for name, p in self.get_sharding_info().items()}
        Path(file_name).write_text(json.dumps(data, indent=2), encoding="utf-8")

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which rows and columns of a tensor of one or two dims, on the mesh's first rank.

    Nothing is printed for an empty tensor. `use_rich` draws the table in colour.
    """
    check_type(dtensor, DTensor, "visualize_sharding", "give a DTensor, or use dshard.visualize for a layout")
    if dtensor.numel() == 0:
        return
    if not 1 <= dtensor.ndim <= 2:
        raise RuntimeError(f"visualize_sharding draws tensors of one or two dims, and this one has {dtensor.ndim}")
    if not is_first_rank(dtensor.layout.mesh):
        return
    heads, rows = table_of(dtensor)
    if header:
        print(header)
    if use_rich:
        show(table(heads, rows))
    else:
        print(text_table(heads, rows))


def table_of(x: DTensor) -> tuple[list[str], list[list[str]]]:
    """Headings, and for each range of rows the ranks that hold each range of columns."""
    layout = x.layout
    held, _ = parts_of(layout, tuple(x.shape))
    if x.ndim == 1:
        held = {(columns, rows): ranks for (rows, columns), ranks in held.items()}
    down, across = (sorted({region[dim] for region in held}, key=lambda r: r.start) for dim in range(2))
    heads = ["", *(f"Col {r.start}-{r.stop - 1}" for r in across)]
    device = layout.mesh.device_type
    rows = [
        [f"Row {r.start}-{r.stop - 1}"]
        + [f"{device}:{','.join(map(str, held[r, c]))}" if (r, c) in held else "" for c in across]
        for r in down
    ]
    return heads, rows
