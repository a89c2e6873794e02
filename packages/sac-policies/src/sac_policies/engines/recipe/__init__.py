"""The engine without a second run: values are rebuilt from what autograd saved for other nodes.

`tables` has the rules, `_recipes` what is kept of a region. Uses `policies`.
"""
