"""From a plan to one rank's forward and backward."""
