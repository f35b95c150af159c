"""Rewrites a graph into another graph: rules, edits, and derivatives of loops."""

from tracegrad.rewriting.rewrite import RewrittenFunction as RewrittenFunction
