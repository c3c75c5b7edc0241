"""Which dims of every op's operands and results correspond: `table.py` is the specification."""
