# SPDX-License-Identifier: Apache-2.0
"""Schedules: the rows that each rank computes and sends at each step, and their cost.

This package needs no torch. `tables` has the types. `demand` describes the input of an algorithm,
and `algorithms` make tables of pairs and transfers from it. `rings` makes the schedule of one pass
from the name of the algorithm. `program` extracts the operations of one rank. `cost` counts bytes
and pairs, `topology` places ranks on nodes, and `head_shares` divides heads among ranks.
"""
