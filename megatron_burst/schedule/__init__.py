"""Which rank computes and sends what at each step, and what that costs. Needs no torch."""
