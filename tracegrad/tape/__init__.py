"""Records operations on ordinary arrays, and computes gradients through the records."""
