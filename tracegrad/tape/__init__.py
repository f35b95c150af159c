"""Recording ordinary arrays into graphs, and gradients of what was recorded."""
