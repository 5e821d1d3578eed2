# SPDX-License-Identifier: Apache-2.0
"""The time of attention, a layer and a step, from schedules, sizes and rates."""
