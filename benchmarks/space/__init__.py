"""Networks split in space: autoshard's plan against gathering and halos exchanged by hand. See docs/benchmarks.md."""
