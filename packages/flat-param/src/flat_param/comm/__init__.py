"""Process groups, collectives, norms over ranks, and diagnosis of failures between ranks.

Uses `layout` and `buffers`.
"""
