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
- A view of a held tensor is not recorded: it is held when it is read, as its memory is in any case.
  Where hooks around the region or a policy may take the memory away, such views are recorded, but
  their replays are not cached.
- Operators that keep state are recorded without it: batch norm without its running statistics,
  which forward updates once. Random numbers are not drawn again; masks are held as bits.
- A replay runs under the flags of the process that the forward had, such as deterministic
  algorithms.
- Small tensors that autograd does not save are copied when a region ends, so that they may be
  written to, as without a region.
- A compiled module that wrote to something is not called again: its saved tensors are held.
- A reduction's result is held if it is much smaller than the argument.
- Nothing is cached while the forward runs.
- Reader counts decide when memory is freed, never which values are computed.
"""
