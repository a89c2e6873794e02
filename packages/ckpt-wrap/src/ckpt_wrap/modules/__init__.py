"""How a module is changed so that its calls are checkpointed or offloaded, and changed back.

In place by a subclass, or nested in a wrapper; names of parameters and old state dicts either way.
Uses `checkpointing` and `offload`.
"""
