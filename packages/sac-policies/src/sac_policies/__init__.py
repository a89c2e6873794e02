"""What to save, recompute or offload in backward, by rule or from a memory budget, eager and compiled."""

__version__ = "0.1.0"
