"""Plain data of multi-turn sampling: segments of tokens and the trajectories that they make."""
