# SPDX-License-Identifier: Apache-2.0
"""From arguments to a plan that every rank agrees on: validate, prepare, plan."""
