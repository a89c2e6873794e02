"""A unit: its parameters and gradients, and when a user gathers it."""
