# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `testing`."""

from ...registry import Plugin

PLUGIN = Plugin(hooks={"cpu": "cpu", "recipe_cpu": "recipes"})
