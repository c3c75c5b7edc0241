"""The plan as typed records, as JSON and as text; what the search leaves to decide."""
