"""Values that no gradient flows to: which calls made them, and which of these may be made again.

`regions` finds what such a call reads. Uses what lies beside this room and asks nothing of calls.
"""
