"""Where every element of a flat tensor lies: pure plans, without any memory.

Specs of parameters, the layout of a segment, the parts of it that ranks hold, and the options of
sharding. Uses no other room.
"""
