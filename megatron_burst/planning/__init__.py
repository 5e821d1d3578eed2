# SPDX-License-Identifier: Apache-2.0
"""Planning of attention calls: check arguments, compare them between ranks, make a plan."""
