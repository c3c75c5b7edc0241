"""Halo exchange for code that is parallel by hand."""
