"""Pipeline stages: a joint graph cut into graphs that run one after another, where to cut, and in what order to run."""
