# SPDX-License-Identifier: Apache-2.0
"""Entry of the plugin `lite`: `plugins.lite.swap` is imported by the user's script."""

from ...registry import Plugin

PLUGIN = Plugin()
