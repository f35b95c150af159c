"""Recording ordinary arrays into graphs, and gradients of what was recorded."""

from tracegrad.tape.forward_accumulator import ForwardAccumulator as ForwardAccumulator
from tracegrad.tape.gradient_tape import GradientTape as GradientTape
from tracegrad.tape.gradients import AggregationMethod as AggregationMethod
from tracegrad.tape.gradients import gradients as gradients
from tracegrad.tape.gradients import hessian_vector_product as hessian_vector_product
from tracegrad.tape.gradients import hessians as hessians
from tracegrad.tape.leaves import UnconnectedGradients as UnconnectedGradients
