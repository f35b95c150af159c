"""Recording ordinary arrays into graphs, and gradients of what was recorded."""

from tracegrad.tape.gradient_tape import GradientTape as GradientTape
from tracegrad.tape.gradient_tape import UnconnectedGradients as UnconnectedGradients
