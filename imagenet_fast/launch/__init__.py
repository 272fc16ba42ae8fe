"""From a command to ranks, and how they ended."""
