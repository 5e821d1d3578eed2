# SPDX-License-Identifier: Apache-2.0
"""Capabilities that a run may add. Each folder is one plugin; `megatron_burst.registry` reads them.

A plugin imports the rest of the package and nothing of another plugin. The rest of the package
never imports a plugin.
"""
