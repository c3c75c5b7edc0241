"""States of forward values: kept for the backward, or computed again there."""
