"""A network of one's own on one node: namespaces with shaped links, ranks forked into them, and what they send."""
