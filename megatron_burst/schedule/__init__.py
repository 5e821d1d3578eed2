"""Schedules: which rank computes and sends what at each step, and what that costs. No torch.

`tables` has the types, `rings` and `moves` make the schedules, `cost` counts bytes and work,
`topology` places ranks on nodes, `head_shares` divides heads among ranks.
"""
