"""`dshard selftest`: whether dshard works on this machine, in one table."""

from dshard.selftest.selftest_run import Result, SelfTest, environment, run

__all__ = ["Result", "SelfTest", "environment", "run"]
