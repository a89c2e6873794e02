"""Parameters sharded over ranks, in six rooms.

- `_sharded_module`: the class of sharded modules, and its methods.
- `unit`: parameters that are gathered and reduced together.
- `schedule`: the order of units in a pass, and the state of the pass.
- `tensor`: the sharded tensor.
- `state`: state dicts, and optimizers.
- `construct`: `fully_shard`.
"""
