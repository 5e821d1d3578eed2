# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `rl`: public names and hooks.

This module does not import `plugins.rl.verl`. verl imports it if `external_lib` in its
configuration names it.
"""

from ...registry import Plugin

PLUGIN = Plugin(
    public={
        "linear_kl": "divergence:linear_kl",
        "linear_logprobs": "logprobs:linear_logprobs",
        "rl": "api",
        "trees": "trees",
    },
    hooks={"trees": "trees"},
)
