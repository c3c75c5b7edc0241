"""Layout to layout: the steps there are, the cheapest sequence of them, and how each is emitted."""
