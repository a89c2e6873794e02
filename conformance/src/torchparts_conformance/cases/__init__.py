"""The cases: one folder an area, each case with the ids of the requirements it checks."""
