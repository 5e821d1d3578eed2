# SPDX-License-Identifier: Apache-2.0
"""BurstAttention for verl: importing this module installs it.

verl imports the module that a configuration names, in every worker, before it builds a model:

    actor_rollout_ref.model.external_lib: megatron_burst.plugins.rl.verl

Then verl's Megatron engines accept the entry `override_transformer_config.burst`, a dict of fields
of `mb.BurstConfig`. No other module of the package has an effect on import. `uninstall()` restores
verl.
"""

from __future__ import annotations

from .engine import VERSIONS, install, uninstall

__all__ = ["VERSIONS", "install", "uninstall"]

install()
