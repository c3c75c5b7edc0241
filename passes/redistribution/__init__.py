"""Parts of `passes.redistribution.redistribute`: the steps, the splits of one dim, the graph of layouts."""
