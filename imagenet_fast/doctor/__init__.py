"""Find what would prevent training on a node, a network or a data set."""
