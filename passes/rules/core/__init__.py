"""What a rule is: its notation, the table, the registry, what it emits on a rank."""
