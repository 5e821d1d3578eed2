# SPDX-License-Identifier: Apache-2.0
"""Running a plan: the executor of schedules, attention passes over it, and head exchanges."""
