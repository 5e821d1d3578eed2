# SPDX-License-Identifier: Apache-2.0
"""Entry of the plugin `lite`. A script of the user imports `plugins.lite.swap`."""

from ...registry import Plugin

PLUGIN = Plugin()
