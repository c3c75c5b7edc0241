"""A batch in pieces, one after the other: time as an axis of which every op says by its rule how it may be split."""
