"""The memory behind a layout: buffers, views of them, and where two tensors share memory.

Buffers, buffers that are borrowed for a while, views of parameters, norms, casts.
Uses `layout`.
"""
