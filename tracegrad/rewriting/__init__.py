"""Graph → Graph."""

from tracegrad.rewriting.rewrite import RewrittenFunction as RewrittenFunction
