"""Checkpoints of sharded modules: saving, loading, optimizer state, other numbers of ranks.

A save is one attempt that all ranks agree on (`_meeting`); `dcp` writes and reads its files. Uses
every room but `in_process` and `handle`.
"""
