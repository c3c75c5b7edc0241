"""Predicted against measured: what `autoshard.report` is made of."""
