"""Measured profiles for people: the command `autoshard profile`, its table and curves, and the cache."""
