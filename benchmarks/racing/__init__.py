"""autoshard's plans against hand-written parallelism, on emulated clusters. See benchmarks/results/race.md."""
