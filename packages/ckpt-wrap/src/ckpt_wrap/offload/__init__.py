"""Saved tensors, kept elsewhere until backward: in host memory, or in files of a folder.

`_offload` is the hooks on saved tensors, `_offloaded_storage` one storage that was moved,
`_offload_scheduler` the order of copies, `_host_tier` and `_disk_tier` the places. Uses no other
room.
"""
