"""The handle that a call of the contract group returns."""

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
    """The handle of an operation in flight; a wait is one of the stream rather than the host.

    It is the host's for a barrier, and with a time limit (ProcessGroupNCCL.hpp, WorkNCCL::wait).
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation, self._outputs = operation, [x for part in operation.parts for x in part.outputs]

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Make the results visible; the host waits too, for a barrier or under a time limit."""
        usage, limited = CURRENT.state.usage, timeout > _NO_LIMIT
        if limited or self._operation.stops_host:
            usage.host_waits += 1
        else:
            usage.stream_waits += 1
        CURRENT.state.end(self._operation, timeout.total_seconds() if limited else None)
        return True

    def synchronize(self) -> None:
        """Make the results visible, as `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the results visible, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Ask on the host whether the operation has run; if so, its results become visible."""
        CURRENT.state.usage.host_waits += 1
        if self._operation.done.is_set() and self._operation.error is None:
            CURRENT.state.end(self._operation)
        return self._operation.done.is_set()

    def is_success(self) -> bool:
        """Whether the operation has run without an error."""
        return self._operation.done.is_set() and self._operation.error is None

    def exception(self) -> BaseException | None:
        """The error of the operation, or None."""
        return self._operation.error

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def get_future(self) -> Any:
        """Return a future of the outputs, whose callbacks see the results."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def __del__(self) -> None:
        operation = getattr(self, "_operation", None)
        if operation is not None:
            operation.dropped = True


class GroupedWork(dist.Work):
    """The handle of a call within a group, which cannot be waited for; ending the group returns the usable one."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Refuse to wait for one call of a group."""
        refuse("coalescing", f"a wait for {self._what} by itself, within a group")
