"""Measurements of what a step, a loader or an engine can do on the machine at hand."""
