# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: process groups, transport, messages, comparison of arguments."""
