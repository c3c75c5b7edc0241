"""Profiles from the outputs of other people's benchmarks: nccl-tests and torch.distributed tables."""

from cost_model.readers.read import read_profile

__all__ = ["read_profile"]
