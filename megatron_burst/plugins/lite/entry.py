# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `lite`. Scripts import `plugins.lite.swap` directly."""

from ...registry import Plugin

PLUGIN = Plugin()
