"""The rules by which nodes are replayed, one row for each kind of node.

`_replay_table` joins them; rows of one origin stand together, and are tried on what `_probes` has.
`_function_rule` makes rules of forwards that others wrote. Uses `_replay` and `_views`.
"""
