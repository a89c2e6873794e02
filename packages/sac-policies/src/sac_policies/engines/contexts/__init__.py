"""The engine of two dispatch modes: one keeps values in forward, one hands them out again.

Uses `policies`.
"""
