"""`dshard selftest`: check that dshard works on this machine, and show the results in one table."""

from dshard.tools.selftest.selftest_run import Result, SelfTest, environment, run

__all__ = ["Result", "SelfTest", "environment", "run"]
