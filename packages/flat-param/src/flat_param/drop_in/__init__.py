"""`FlatParamHandle`: the names and behaviour of torch's private handle.

Uses `layout`, `memory` and `comm`.
"""
