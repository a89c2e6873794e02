"""`flatten`: the parameters of a module as views of flat tensors, in one process.

Flat parameters and gradients by segment, chunks for optimizers, tensors that share memory. Uses
`layout` and `buffers`.
"""
