"""Plans without a GPU: a step on fake tensors, with roofline times of a named device.

Runs the levels of `fit_` on tensors without data, adds up mixtures of them, and prints what fits.
`python -m sac_policies plan` is the command.
"""
