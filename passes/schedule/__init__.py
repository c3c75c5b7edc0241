"""The order of collectives, their merging, and what runs behind what."""
