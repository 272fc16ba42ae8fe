"""What a run and its launcher leave on disk, and how a run ends."""
