"""Linear attention and state-space scans beside the ring."""
