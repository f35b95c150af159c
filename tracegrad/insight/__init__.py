"""What becomes of the gradient, for people: views of a graph, and what explains them."""

from tracegrad.insight.explain import explain as explain
from tracegrad.insight.explanation import Explanation as Explanation
from tracegrad.insight.explanation import Finding as Finding
from tracegrad.insight.explanation import SourceReport as SourceReport
from tracegrad.insight.show import GraphView as GraphView
from tracegrad.insight.show import show as show
