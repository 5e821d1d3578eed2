# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `vision`. Scripts import `plugins.vision.images` directly."""

from ...registry import Plugin

PLUGIN = Plugin(hooks={"vision_recipes": "recipes"})
