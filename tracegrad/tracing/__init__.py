"""Python function → Graph, and the decorator `trace`, which compiles a function by its graph."""

from tracegrad.tracing.callable import to_callable as to_callable
from tracegrad.tracing.graphs import Rule as Rule
from tracegrad.tracing.graphs import graph as graph
from tracegrad.tracing.retracing import RetraceWarning as RetraceWarning
from tracegrad.tracing.traced import TracedFunction as TracedFunction
from tracegrad.tracing.traced import trace as trace
