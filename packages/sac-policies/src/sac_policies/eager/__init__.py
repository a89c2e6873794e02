"""The tape: an eager engine that records operator calls and replays those that backward needs.

One dispatch mode around the forward records calls of functional operators; saved-tensor hooks
save a reference into the tape instead of each tensor; backward replays the calls it needs.

Invariants:
- A value on the tape never changes: a tensor held with its version, or a call of a functional,
  deterministic operator on other values.
- A tensor represents a value only while it has the recorded identity and version. Other tensors
  are unknown: they are held by reference when they are first read. Results of random, opaque and
  collective operators are unknown, and so is everything made without gradients.
- Before an operator writes to a storage, all tensors of that storage become unknown, and each value
  that holds one of them gets a copy with the same strides.
- A view of a held tensor is never cached, and nothing is cached while the forward runs.
- Reader counts decide when memory is freed, never which values are computed.
"""
