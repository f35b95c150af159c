"""Tools that report on a gradient: views of a graph, checks, explanations and memory."""

from tracegrad.insight.check_grads import GradientError as GradientError
from tracegrad.insight.check_grads import check_grads as check_grads
from tracegrad.insight.comparisons import Checked as Checked
from tracegrad.insight.comparisons import GradCheck as GradCheck
from tracegrad.insight.explain import explain as explain
from tracegrad.insight.explanation import Explanation as Explanation
from tracegrad.insight.explanation import Finding as Finding
from tracegrad.insight.explanation import SourceReport as SourceReport
from tracegrad.insight.memory import MemoryReport as MemoryReport
from tracegrad.insight.memory import memory as memory
from tracegrad.insight.show import GraphView as GraphView
from tracegrad.insight.show import show as show
