"""Where tensors live: layouts, torch's placements, windows, the layouts at every node."""
