"""One run of the cases inside pytest, from what has to run to the rows of the report.

`plugin`, at the root, is its face towards pytest. Uses `render` and below.
"""
