"""The race of autoshard's plans against hand-written parallelism, on emulated clusters. See docs/race.md."""
