# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `diffusion`, which recipes use."""

from ...registry import Plugin

PLUGIN = Plugin(hooks={"diffusion_recipes": "recipes"})
