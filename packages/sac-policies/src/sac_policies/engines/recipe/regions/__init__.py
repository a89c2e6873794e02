"""One forward of one region: what decides of each tensor that autograd saves, and packs it.

A plain region asks a table of rules, a marked one names and modules too, a planned one its plan;
a repeated one does what the one before did, under a policy or a plan.
Uses what lies beside this room, but for what runs and explains regions.
"""
