"""Options of a matmul: a strategy, the layout of its result, and which copies the backward pass keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dshard.comm import Scoped, outside_graphs
from dshard.core.context import declare_setting
from dshard.core.wrapper import Wrapper
from dshard.errors import StrategyError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.routing import Routing
from dshard.rules.attention_loops import ATTENTIONS, AttentionLoop, RequestedLoops
from dshard.rules.expand import Allowed, Row
from dshard.rules.expert_loops import EXPERTS, ExpertLoop
from dshard.rules.expert_loops import RequestedLoops as RequestedExpertLoops
from dshard.rules.matmul_loops import Schedule, allowed_rows, strategy_named
from dshard.rules.panel_stream import AutoPanels, Stream
from dshard.rules.rule import Rule
from dshard.rules.strategy import Constraints
from dshard.validate import check_type

Saved: TypeAlias = Literal["auto", "moved", "stored"]
"""Which copies of the operands the backward pass keeps: redistributed, as stored, or as `use_strategy` says."""


@dataclass(frozen=True, slots=True)
class MatmulOptions:
    """A strategy by name or as a schedule, the layout of the result, and what is saved for the backward pass.

    `attention` are loops of attention, and of its two matmuls where attention is written as matmuls; `experts` are
    those of layers of experts, whose tokens are expected to be spread as `routing` says. `among` lists
    alternatives, each with the rows of the caller's rule that every mesh axis may have.
    """

    strategy: str | Schedule | None = None
    result: Layout | None = None
    saved: Saved = "auto"
    stream: Stream | AutoPanels | None = None
    attention: RequestedLoops = None
    experts: RequestedExpertLoops = None
    routing: Routing | None = None
    among: tuple[Allowed, ...] | None = None

    def streamed(self) -> Stream | AutoPanels | None:
        """The requested panels, or those of the strategy."""
        if self.stream is not None or self.strategy is None:
            return self.stream
        return (self.strategy if isinstance(self.strategy, Schedule) else strategy_named(self.strategy).schedule).stream

    def constraints(self, rule: Rule, mesh: Mesh, needs: Sequence[bool], leaf: Sequence[bool]) -> Constraints:
        """The constraints for one matmul; `needs`: which operands need a gradient, `leaf`: which are leaves."""
        stream = self.streamed()
        if stream is not None and self.saved == "moved":
            raise StrategyError(
                f"{stream} with saved='moved': in panels no operand is ever there whole, so none can be "
                "kept as it was multiplied; use saved='stored' or 'auto', or leave the panels out"
            )
        match self.saved:
            case "auto":
                kept = tuple([not (is_leaf and needed) for is_leaf, needed in zip(leaf, needs, strict=True)])
            case "moved" | "stored":
                kept = (self.saved == "moved",) * 2
        if isinstance(stream, Stream) and stream.transport != "symmetric":
            kept = (False, False)  # the whole operands are never there
        among, reduced = self._by_heads(rule) if self.among is None else self.among, None
        if self.strategy is not None:
            among = allowed_rows(self.strategy, rule, mesh)
            reduced = self._reduced(mesh) if self.result is None else None
        return Constraints(None, self.result, tuple(needs), kept, among, reduced)

    def _by_heads(self, rule: Rule) -> tuple[Allowed, ...] | None:
        """The rows that the loops of attention allow a matmul of [batch, heads, queries, features] within it.

        Loop h is the heads that both operands and the result have; the other loops leave the matmul to its price.
        """
        terms = (*rule.inputs[:2], rule.outputs[0])  # a sum cut into blocks has more dims in its operands
        if not isinstance(self.attention, tuple) or min(map(len, terms)) < 4:
            return None
        heads = frozenset[Row](set(rule.inputs[0][-3]) & set(rule.inputs[1][-3]) & set(rule.outputs[0][-3]))
        return (tuple(heads if loop == "h" else None for loop in self.attention),) if heads else None

    def _reduced(self, mesh: Mesh) -> tuple[str, ...]:
        """For each mesh axis the placement requested for a sum that the contraction leaves partial there."""
        if isinstance(self.strategy, Schedule):
            return self.strategy.stored
        assert self.strategy is not None
        schedule = strategy_named(self.strategy).schedule
        pairs = zip(schedule.loops, schedule.stored, strict=True)
        return (next((stored for loop, stored in pairs if loop == "k"), "P"),) * mesh.ndim


NO_OPTIONS = MatmulOptions()
_INHERITED = ("strategy", "stream", "attention", "experts", "routing")

_ALL: dict[MatmulOptions, MatmulOptions] = {NO_OPTIONS: NO_OPTIONS}


def _merged(changes: Sequence[MatmulOptions]) -> MatmulOptions:
    """The combined options of all open blocks: `saved` of the innermost, strategy and panels of the innermost with any.

    Equal options are one object, so that a compiled graph can be guarded by its identity.
    """
    options = changes[0] if changes else NO_OPTIONS
    for change in changes[1:]:
        outer = {name: getattr(options, name) for name in _INHERITED if getattr(change, name) is None}
        options = replace(change, **outer)
    return _ALL.setdefault(options, options)


_BLOCKS: Scoped[MatmulOptions, MatmulOptions] = Scoped("matmul options", _merged)
OPTION_BLOCKS: Sequence[object] = _BLOCKS.anywhere
"""Empty while no thread is in a block of `use_strategy`."""
current_options = _BLOCKS.in_force
"""The options that `use_strategy` has in force at this call."""


class GuardedOptions:
    """The options as of the last block entered or left, as a plain attribute: compiled graphs read no ContextVar."""

    options = NO_OPTIONS


def kept_options(options: MatmulOptions) -> MatmulOptions:
    """The cached object that stands for all options equal to these."""
    return _ALL.setdefault(options, options)


def options_of(weight: object) -> MatmulOptions:
    """The options of a matmul with `weight`: those pinned to it within those of the blocks around the call."""
    pinned: MatmulOptions | None = weight._matmul if isinstance(weight, Wrapper) else None
    if pinned is None:
        return current_options()
    return _merged((current_options(), pinned)) if OPTION_BLOCKS else pinned


declare_setting(_BLOCKS)


@contextmanager
def use_strategy(
    *,
    matmul: str | Schedule | None = None,
    saved: Saved = "auto",
    panels: int | Literal["auto"] | Stream | None = None,
    buffer_bytes: int | None = None,
    attention: str | Sequence[AttentionLoop | None] | None = None,
    experts: str | Sequence[ExpertLoop | None] | None = None,
    routing: Routing | None = None,
) -> Iterator[None]:
    """Within the block matmuls and attention use these strategies instead of the cheapest; matmuls run in `panels`.

    `attention` is a name, such as "ulysses", "context", "ring" or "split-keys", or a loop for each mesh axis: "b", "h",
    "q", "k", "ring", "balanced ring", or None for the cheapest (`dshard.rules.attention_loops` has the table).

    `experts` are loops of layers of experts: a name, such as "expert", "ragged" or "tokens", or a loop for each mesh
    axis: "t", "e", "f", "ragged", or None for the cheapest (`dshard.rules.expert_loops` has the table). `routing` says
    how tokens are expected to be spread over experts, by which the cheapest is chosen: see `dshard.Routing`.

    With `panels` "auto" each matmul runs as is priced to take the fewest seconds: in a number of panels, in bulk, or by
    symmetric memory; `buffer_bytes` limits the choice to buffers of at most that on a rank, or else to the smallest. A
    `Stream` says how panels are sent.

    `saved` says which copies of redistributed operands are kept for the backward pass: "moved" keeps the redistributed
    copies, so that nothing is sent twice; "stored" keeps the stored local tensors and redistributes them again; "auto"
    keeps redistributed activations, but redistributes parameters again, for gathered parameters would otherwise pile up
    over the layers. In panels only stored local tensors are kept, and what kernels of symmetric memory have gathered.
    All this holds for the thread and the asynchronous task that enters the block.

    Raises:
        StrategyError: there is no strategy of this name, or no such stream.
    """
    outside_graphs("use_strategy")
    if matmul is not None:
        check_strategy(matmul)
    check_saved(saved)
    loops = ATTENTIONS.checked(attention)
    if routing is not None:
        check_type(routing, Routing, "routing", "give a dshard.Routing, such as Routing.zipf(1.0)")
    options = MatmulOptions(
        matmul,
        saved=saved,
        stream=stream_of(panels, buffer_bytes),
        attention=loops,
        experts=EXPERTS.checked(experts),
        routing=routing,
    )
    leave = enter_options(options)
    try:
        yield
    finally:
        leave()


def enter_options(options: MatmulOptions) -> Callable[[], None]:
    """Begin a block of `use_strategy` with these options; the function returned ends it."""
    outside_graphs("use_strategy")
    block = _BLOCKS.enter(options)
    GuardedOptions.options = current_options()

    def leave() -> None:
        _BLOCKS.leave(block)
        GuardedOptions.options = current_options()

    return leave


def check_strategy(strategy: object) -> None:
    """Refuse what is neither the name of a strategy nor a schedule."""
    if not isinstance(strategy, Schedule):
        strategy_named(strategy)  # type: ignore[arg-type]  # it refuses what is no name


def check_saved(saved: object) -> None:
    """Refuse another choice than those of `Saved`."""
    if saved not in ("auto", "moved", "stored"):
        raise StrategyError(f"saved={saved!r}: use 'auto', 'moved' or 'stored'")


def stream_of(panels: int | Literal["auto"] | Stream | None, limit: int | None = None) -> Stream | AutoPanels | None:
    """A number of panels as a stream, or as a choice within a limit of bytes in buffers."""
    if panels == "auto":
        return AutoPanels(limit)
    if limit is not None:
        raise StrategyError(f"buffer_bytes={limit} with panels={panels!r}: a limit needs a choice, panels='auto'")
    return panels if panels is None or isinstance(panels, Stream) else Stream(panels)
