"""`Variable`s: what they hold, and how whoever traces, records or explains learns of their use."""

from tracegrad.variables.trees import as_variables as as_variables
from tracegrad.variables.trees import assign_values as assign_values
from tracegrad.variables.trees import values_of as values_of
from tracegrad.variables.variable import Variable as Variable
