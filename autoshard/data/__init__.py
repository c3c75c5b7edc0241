"""Inputs of parallel training: from a dataset or one rank's tensor to what each rank passes to the model."""
