"""What a run found, as data.

The outcomes, the report with its schema, verdicts and digest, failures announced beforehand, the
difference of two reports, and the results file of the site. Reads untrusted files within limits.
Uses `requirements` and `subject`.
"""
