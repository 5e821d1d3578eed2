# SPDX-License-Identifier: Apache-2.0
"""Entry of the plugin `vision`. A script of the user imports `plugins.vision.images`."""

from ...registry import Plugin

PLUGIN = Plugin(hooks={"vision_recipes": "recipes"})
