"""The checks of `dshard selftest`, for programs."""

from dshard.tools.selftest import Result, SelfTest, environment, run

__all__ = ["Result", "SelfTest", "environment", "run"]
