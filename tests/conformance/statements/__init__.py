"""What the gradients of the TensorFlow-flavoured half mean, statement by statement, as programs.

Each program takes a namespace, either TensorFlow's (see ``record.py``) or tracegrad's (see
``test_conformance.py``), and returns numbers, None and names of exception classes in lists and
dicts. A statement on which tracegrad decided otherwise has its own result beside it.
"""

from statements import annotations, forward_mode, slices_and_hosts, tapes, targets
from statements.statement import STATEMENTS, plain

__all__ = [
    "STATEMENTS",
    "annotations",
    "forward_mode",
    "plain",
    "slices_and_hosts",
    "tapes",
    "targets",
]
