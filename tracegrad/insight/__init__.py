"""What becomes of the gradient, for people: views of a graph, and what explains them."""

from tracegrad.insight.show import GraphView as GraphView
from tracegrad.insight.show import show as show
