"""Which dims of every op's operands and results correspond: `core/rule_table.py` is the specification."""
