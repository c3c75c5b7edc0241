"""Every rank's program in one process, in lockstep; the unsharded model; what rounding may change."""
