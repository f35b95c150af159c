"""Graph → a function that JAX can transform and XLA can compile."""

from tracegrad.lowering.evaluate import Lowering as Lowering
from tracegrad.lowering.evaluate import evaluate as evaluate
from tracegrad.lowering.evaluate import evaluate_node as evaluate_node
from tracegrad.lowering.evaluate import read as read
from tracegrad.lowering.evaluate import run_nodes as run_nodes
from tracegrad.lowering.regions import bind_functions as bind_functions
from tracegrad.lowering.regions import has_jit_settings as has_jit_settings
