"""What a run found, as data.

The outcomes, the report with its schema, verdicts and digest, failures announced beforehand, the
difference of two reports, and the attestation's predicate. Reads files of strangers within limits.
Uses `requirements` and `subject`.
"""
