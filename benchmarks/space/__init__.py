"""Networks split in space, against gathering and halos exchanged by hand. See benchmarks/results/benchmarks.md."""
