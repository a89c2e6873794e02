"""How a decision is carried out: three engines, none of which imports another.

`contexts` keeps values by a dispatch mode and runs the rest again; `recipe` rebuilds values from
what autograd saved; `_tags` marks the nodes of a compiled graph. `_guards` sees for the
first two what changed between forward and backward. Uses `policies`.
"""
