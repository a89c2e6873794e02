"""`fully_shard`: units whose parameters are divided among ranks, gathered to compute, and freed.

A step begins in `_sharded_module`. `_schedule` has the order of units, `_passes` the state of the
running pass; `_unit` unshards and reshards, `_sharded_params` and `_sharded_grads` hold a segment's
memory. Uses `layout`, `buffers` and `comm`.
"""
