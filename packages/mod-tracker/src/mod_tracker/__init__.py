"""Which module is running, in forward, recompute and backward; FLOP, time, memory and trace reports."""

__version__ = "0.1.0"
