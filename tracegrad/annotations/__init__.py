"""Annotations: functions and decorators with which a user defines a gradient inside the code.

A call of an annotated function binds JAX's own primitive, so annotated functions work in plain JAX,
without another function of this package around them.
"""
