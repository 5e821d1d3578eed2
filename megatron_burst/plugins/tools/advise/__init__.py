# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a run on a cluster, from plain numbers without torch and Megatron.

`shapes` has models, `settings` the settings of a run, `account` memory, `forecast` time, and
`search` the search for settings.
"""
