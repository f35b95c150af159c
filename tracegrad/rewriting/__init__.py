"""Graph → Graph."""
