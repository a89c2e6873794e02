"""torch's optimizers whose state is counts, and tensors of their parameter's shape."""

from torch import optim

ELEMENTWISE = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
        *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
