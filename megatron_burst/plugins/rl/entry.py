# SPDX-License-Identifier: Apache-2.0
"""Entry of the plugin `rl`.

This module does not import `plugins.rl.verl`; verl's configuration does (`external_lib`).
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
