"""Plans before there is a GPU: a step on fake tensors, with roofline times of a named device.

Runs the levels that `fit_` chooses from on tensors without data, adds up mixtures of them, and
says what fits. `python -m sac_policies plan` prints it.
"""
