"""The cases: one folder per area. Each case names the requirements it checks."""
