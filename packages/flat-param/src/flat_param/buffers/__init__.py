"""Parameters as views of a buffer, and gradients in a buffer.

Also the checks before a parameter's memory moves. Uses `layout`.
"""
