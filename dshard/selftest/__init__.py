"""`dshard selftest`: whether dshard works on this machine, in one table."""

from dshard.selftest.selftest_run import Result, environment, run

__all__ = ["Result", "environment", "run"]
