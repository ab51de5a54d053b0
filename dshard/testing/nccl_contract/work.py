"""The work that a call of the contract group returns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.testing.nccl_contract.contract_rules import refuse
from dshard.testing.nccl_contract.operation import Operation
from dshard.testing.nccl_contract.process_state import CURRENT

_NO_LIMIT = timedelta(0)


class ContractWork(dist.Work):
    """An operation in flight. A wait lets the results be seen, and counts as one of the stream's, not the host's.

    It is the host's for a barrier, and with a time limit (ProcessGroupNCCL.hpp, WorkNCCL::wait).
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation, self._outputs = operation, [x for part in operation.parts for x in part.outputs]

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Let what follows see the results; the host waits, too, for a barrier or where there is a limit."""
        usage, limited = CURRENT.state.usage, timeout > _NO_LIMIT
        if limited or self._operation.stops_host:
            usage.host_waits += 1
        else:
            usage.stream_waits += 1
        CURRENT.state.end(self._operation, timeout.total_seconds() if limited else None)
        return True

    def synchronize(self) -> None:
        """Let what follows see the results."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let what follows see the results."""
        self.wait()

    def is_completed(self) -> bool:
        """Ask whether the operation has run; the host waits for the answer. Where it has the results are there."""
        CURRENT.state.usage.host_waits += 1
        if self._operation.done.is_set() and self._operation.error is None:
            CURRENT.state.end(self._operation)
        return self._operation.done.is_set()

    def is_success(self) -> bool:
        """Whether it has run without an error."""
        return self._operation.done.is_set() and self._operation.error is None

    def exception(self) -> BaseException | None:
        """The error of the operation, if it has one."""
        return self._operation.error

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def get_future(self) -> Any:
        """A future of the outputs, whose callbacks see the results."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def __del__(self) -> None:
        operation = getattr(self, "_operation", None)
        if operation is not None:
            operation.dropped = True


class GroupedWork(dist.Work):
    """The result of a call within a group, for which nobody may wait: the end of the group returns the work."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Refuse."""
        refuse("coalescing", f"a wait for {self._what} by itself, within a group")
