"""Formats that store many images per file, and the index that finds any of them at once."""
