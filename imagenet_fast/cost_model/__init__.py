"""What a step and a network cost, without torch: profiles, the cost model, limits."""
