"""The costs of a step and of a network, without torch: layer profiles, the cost model, lower bounds."""
