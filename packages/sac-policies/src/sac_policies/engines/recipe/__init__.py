"""The engine without a second run: values are rebuilt from what autograd saved for other nodes.

`_replay_table` has the rules, `_recipes` what is kept of a region. Uses `policies`.
"""
