# SPDX-License-Identifier: Apache-2.0
"""Schedules: which rank computes and sends what at each step, and what that costs. No torch.

`tables` has the types; `algorithms` make tables of pairs and transfers from a `demand`, and `rings`
takes one by name; `program` is one rank's view; `cost` counts bytes and work, `topology` places
ranks on nodes, `head_shares` divides heads among ranks.
"""
