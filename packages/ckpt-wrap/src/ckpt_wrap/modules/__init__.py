"""Change a module so that its calls are checkpointed or offloaded, and change it back.

In place by a subclass, or nested in a wrapper; names of parameters and old state dicts either way.
Uses `checkpointing` and `offload`.
"""
