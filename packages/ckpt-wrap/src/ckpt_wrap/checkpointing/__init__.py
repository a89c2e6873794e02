"""One checkpointed call: its first run, what is kept of it, and its second run in backward.

`_checkpoint` chooses the way, `_call` is what a second run needs, `_recompute` the hooks on saved
tensors, `_ambient_state` random state and autocast, `_objects` arguments that the call changes,
`_functional_call` weights put in for it. Uses `offload` for policies of torch that
offload.
"""
