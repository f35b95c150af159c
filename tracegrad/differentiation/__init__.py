"""Derivatives of functions: gradients, Jacobians, Hessians, and connections to inputs."""
