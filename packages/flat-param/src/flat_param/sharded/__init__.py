"""`fully_shard`: units whose parameters are divided among ranks, gathered to compute, and freed.

A step begins in `_sharded_module`, which calls `_unit`: the forward and backward of one unit.
`_schedule` has the order of units and `_passes` the state of the running pass. `_unit_params`
gathers and frees; `_sharded_params` and `_sharded_grads` hold a segment's memory. Uses `layout`,
`buffers` and `comm`.
"""
