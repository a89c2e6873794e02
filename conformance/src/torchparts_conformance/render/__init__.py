"""Reports as people read them: badge, matrix, HTML, JUnit, and the pages of the requirements.

Each is text made from data; `_render` alone writes files. Words of a report may be a stranger's and
pass through `_text`. Uses `report` and below.
"""
