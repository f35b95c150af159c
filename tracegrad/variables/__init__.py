"""`Variable`s: their values, and the listeners that learn of reads and assignments."""

from tracegrad.variables.trees import as_variables as as_variables
from tracegrad.variables.trees import assign_values as assign_values
from tracegrad.variables.trees import values_of as values_of
from tracegrad.variables.variable import Variable as Variable
