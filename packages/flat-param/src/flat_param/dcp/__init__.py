"""Checkpoints on disk, in torch.distributed.checkpoint's format with checksums.

What a folder holds (`_stored`), how it is written, read and committed (`_dcp_write`, `_dcp_read`,
`_checkpoint`). Knows neither modules nor process groups. Uses `layout` and `memory`.
"""
