"""How a decision is carried out: three engines, none of which imports another.

`contexts` keeps values by a dispatch mode and runs the rest again; `recipe` rebuilds values from
what autograd saved; `_tags` marks the nodes of a compiled graph. Where no decision is to be made,
`_second_forward` keeps nothing and runs all again. `_guards` sees for the first two what changed
between forward and backward, `_ambient_state` restores what code runs with. Uses `policies`.
"""
