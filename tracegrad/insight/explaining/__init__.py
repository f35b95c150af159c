"""Why the gradients of a graph are what they are: what is measured in it, and what that means."""
