"""One mechanism each for parameters that are views of a buffer and for gradients in a buffer.

Also the checks that come before a parameter's memory moves. Uses `layout`.
"""
