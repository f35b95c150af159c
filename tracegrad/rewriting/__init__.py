"""Graph → Graph."""

from tracegrad.rewriting.rewrite import RewrittenFunction as RewrittenFunction
from tracegrad.rewriting.rewrite import rewrite as rewrite
