"""Prices that the program's own kernels and collectives confirm, timed where they will run."""
