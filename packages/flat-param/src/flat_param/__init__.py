"""Parameters as one flat tensor, in one process or sharded over many on torch.distributed."""

__version__ = "0.1.0"
