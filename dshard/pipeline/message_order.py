"""A total order of all messages of a pipeline, in which every stage begins its own.

Kernels of two NCCL communicators may wait for each other's end, for example if they do not fit on the GPU together. So
NCCL requires that ranks begin operations on several communicators in the same order
(docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). Stages that post receives early break
this: a stage posts the receive of a gradient before it sends the activation that the gradient depends on.

Here messages are in the order in which they are computed. Every message depends only on earlier ones, so stages cannot
deadlock, even if each of them waits for the end of every action before the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from itertools import chain

from dshard.caches import cached
from dshard.pipeline.actions import Action, Receive, Send
from dshard.pipeline.costs import StageCost, uniform
from dshard.pipeline.program import Program
from dshard.pipeline.simulator import simulate

_CROSSING = 1.0
"""Seconds that a value crosses, beside a forward of one second: later stages run so far behind the earlier ones. Of a
shorter crossing a stage would begin each receive only after it has sent what it computed last."""


@cached("pipeline actions", 64)
def in_one_order(program: Program) -> tuple[tuple[Action, ...], ...]:
    """The actions of every stage, with receives at their place in a total order of the messages of all stages.

    Stages compute and send as in `program.actions`. A receive begins where it does there, unless the order puts it
    earlier or later.

    >>> from dshard.pipeline import chain
    >>> for actions in in_one_order(Program("1f1b", 2, 2, chain(2))):
    ...     print(", ".join(map(str, actions)))
    F0, send x 0->1 of microbatch 0, F1, send x 0->1 of microbatch 1, receive gradient of x 1->0 of microbatch 0, receive gradient of x 1->0 of microbatch 1, B0, B1
    receive x 0->1 of microbatch 0, receive x 0->1 of microbatch 1, F0, B0, send gradient of x 1->0 of microbatch 0, F1, B1, send gradient of x 1->0 of microbatch 1
    """  # noqa: E501
    timeline = simulate(program, uniform(program.n_stages, program.edges, StageCost(), seconds=_CROSSING))
    spans = sorted(chain.from_iterable(timeline.spans), key=lambda span: (span.end, span.stage))
    order = [Send(edge, span.compute.microbatch) for span in spans for edge in program.gives(span.compute, span.stage)]
    return tuple(tuple(_actions(program, stage, order)) for stage in range(program.n_stages))


def _actions(program: Program, stage: int, order: Sequence[Send]) -> Iterator[Action]:
    """The actions of a stage, with its messages in `order`."""
    messages = deque(_at_stage(stage, message) for message in order if stage in (message.edge.src, message.edge.dst))
    posted: set[Send | Receive] = set()
    for action in program.actions(stage):
        match action:
            case Send():
                yield from _until({action}, messages)
            case Receive():
                posted.add(action)
            case compute:
                needed = {Receive(edge, compute.microbatch) for edge in program.takes(compute, stage)}
                yield from _until(needed, messages)
                yield compute
        while messages and messages[0] in posted:
            yield messages.popleft()


def _at_stage(stage: int, message: Send) -> Send | Receive:
    return message if message.edge.src == stage else Receive(message.edge, message.microbatch)


def _until(needed: Set[Send | Receive], messages: deque[Send | Receive]) -> Iterator[Action]:
    """Take messages up to the last of `needed`."""
    while not needed.isdisjoint(messages):
        yield messages.popleft()
