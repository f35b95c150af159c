"""What a user writes inside a function to say what its gradient is.

Each annotation lowers to its JAX primitive where it is called, so that annotated functions work in
plain JAX, with nothing of this package around them.
"""
