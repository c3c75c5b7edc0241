"""Seconds and bytes of a step of the program that runs."""
