"""`fully_shard`: units whose parameters are divided among ranks, gathered to compute, and freed.

A step begins in `_sharded_module`, its order is in `_schedule`, what is known of the running pass
in `_passes`; `_unit` gathers and frees, `_sharded_params` and `_sharded_grads` hold a segment's
memory. Uses `layout`, `buffers` and `comm`.
"""
