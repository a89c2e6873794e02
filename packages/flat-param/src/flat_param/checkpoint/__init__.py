"""Checkpoints of sharded modules and optimizers, in torch.distributed.checkpoint's format."""
