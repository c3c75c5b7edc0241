"""`verify`: every rank of a plan simulated, and compared with the unsharded model."""
