"""The tape: an eager engine that records operator calls and replays what backward reads.

One dispatch mode around the forward records calls of functional operators; saved-tensor hooks
save a reference into the tape in place of each tensor; backward replays the calls it needs.

Invariants:
- A value on the tape is immutable bits: a tensor held with its version, or a call of a functional,
  deterministic operator on other values.
- A tensor stands for a value only while its identity and version are those noted. Other tensors
  are unknown: they are held by reference when they are first read. Results of random, opaque and
  collective operators are unknown, and so is everything made without gradients.
- Before an operator writes to a storage, every tensor of that storage is forgotten, and each value
  that holds one of them gets a copy with the same strides.
- A view of a held tensor is never cached, and nothing is cached while the forward runs.
- Counts of readers decide when memory is freed, never what is computed.
"""
