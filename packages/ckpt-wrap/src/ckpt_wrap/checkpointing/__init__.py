"""One checkpointed call: forward, the inputs kept of it, and recomputation in backward.

`_checkpoint` chooses the way, `_call` holds the inputs of recomputation, `_recompute` the hooks on
saved tensors, `_arguments` the arguments, `_module_state` buffers and parameters, `_surroundings`
other attributes, `_ambient_state` random state and autocast.
"""
