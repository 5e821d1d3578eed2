# SPDX-License-Identifier: Apache-2.0
"""How long attention, a layer and a step take, from schedules, sizes and rates."""
