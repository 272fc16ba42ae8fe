"""Launching: from a command line to ranks on all nodes, and how they ended."""
