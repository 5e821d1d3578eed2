# SPDX-License-Identifier: Apache-2.0
"""Planning of a call: validate arguments, agree between ranks, make a plan."""
