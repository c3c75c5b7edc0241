"""Plans to hold against the one that the search found, and the timeline that judges them."""
