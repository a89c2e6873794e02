"""All that talks to other ranks: process groups, collectives, and what goes wrong between ranks.

Agreement before anything is sharded, messages between peers, the order of collectives, norms over
ranks, ranks that are gone. Nothing else calls torch.distributed. Uses `layout` and `buffers`.
"""
