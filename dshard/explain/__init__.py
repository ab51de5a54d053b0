"""Why an operator runs as it does: all candidates, what each moves and costs, and which was taken.

`calls` explains the operators that a function calls, `product` a matrix product of given sizes, `source` text and
files; `price` has what a candidate moves and holds, `values` what is returned.
"""

from dshard.explain.explain_calls import explain
from dshard.explain.product import LEGEND, explain_matmul
from dshard.explain.report_values import Candidate, Explanation, Report
from dshard.explain.source import describe_tensor, explain_source, parse_dtype, read_layout

__all__ = [
    "LEGEND",
    "Candidate",
    "Explanation",
    "Report",
    "describe_tensor",
    "explain",
    "explain_matmul",
    "explain_source",
    "parse_dtype",
    "read_layout",
]
