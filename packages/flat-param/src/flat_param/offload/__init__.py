"""`offload_optimizer`: optimizer state in CPU memory or in a folder, moved around each step.

What a step does is in `_optimizer`, where state lies in `_tiers`, and the thread that moves it in
`_mover`. Knows nothing of flat or sharded parameters; uses `layout` and
`memory`.
"""
