"""Graph → Graph."""

from tracegrad.rewriting import rules as rules
from tracegrad.rewriting.intermediates import intermediate_gradients as intermediate_gradients
from tracegrad.rewriting.intermediates import intermediates as intermediates
from tracegrad.rewriting.rewrite import RewrittenFunction as RewrittenFunction
from tracegrad.rewriting.rewrite import rewrite as rewrite
