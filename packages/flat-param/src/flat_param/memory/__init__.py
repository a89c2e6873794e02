"""The memory behind a layout: buffers, views of them, and where two tensors share memory.

Buffers with huge pages, memory that is lent for a while, views of parameters, norms, casts.
Uses `layout`.
"""
