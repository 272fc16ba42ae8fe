"""Ranks of a run: their environment, process groups, rendezvous, agreement and failure detection."""
