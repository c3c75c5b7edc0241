"""`Plan`: found, cached, checked, written, explained."""
