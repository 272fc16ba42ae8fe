"""Set runs side by side: training them, reading them, and drawing what a step of each did."""
