"""A run whose subject lives in a process of its own, watched by one that judges.

The judge starts the process, hears each outcome as it happens, and holds the report against them.
Uses `plugin`, `run` and below.
"""
