"""Checkpoints of sharded modules: saving, loading, optimizer state, other numbers of ranks.

A save is one attempt that all ranks agree on (`_meeting`), written with checksums in the format of
torch.distributed.checkpoint (`_dcp_write`, `_dcp_read`), and committed by one rename. Uses every
room but `in_process` and `drop_in`.
"""
