"""Explains the gradients of a graph: measures its values and cotangents, and draws conclusions."""
