# SPDX-License-Identifier: Apache-2.0
"""Planning of a call: validate arguments, compare them between ranks, and make a plan."""
