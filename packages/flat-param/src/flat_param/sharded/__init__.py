"""Parameters sharded over ranks.

`_schedule` has the order of units and `_passes` the state of the running pass. `_unit` gathers and
frees the parameters of one unit, and `_sharded_params` and `_sharded_grads` those of one segment.
"""
