"""Rules tried on numbers, and found for an op that has none."""
