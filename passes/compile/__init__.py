"""From a rank's graph to a callable, op by op or through Inductor."""
