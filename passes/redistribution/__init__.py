"""Parts of `passes.redistribute`: the steps, the splits of one dim, the graph of layouts."""
