"""From the captured graph to the primitive ops that rules are written for; one module a pass."""
