"""Activation checkpointing and offload, per module, leaving the model exactly as it was."""

__version__ = "0.1.0"
