"""Derivatives of functions: gradients, Jacobians, Hessians, and what is connected to what."""
