"""Explanations of operators: all candidates, the bytes and seconds of each, and which was chosen.

explain_calls.py   the operators that a function calls, and the figures of a candidate
explain_matmul.py  a matmul of given sizes, by every schedule
source.py          expressions, and functions in files
report_values.py   the values that are returned
"""

from dshard.explain.explain_calls import explain
from dshard.explain.explain_matmul import LEGEND, explain_matmul
from dshard.explain.report_values import Candidate, Explanation, Report
from dshard.explain.source import describe_tensor, explain_source, load_function, parse_dtype, read_layout
