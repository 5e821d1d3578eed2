"""What a recipe holds in place of its layer spec.

Owns: the function that a recipe's ``transformer_layer_spec`` is a partial of. It is public, of this
module, and takes plain values, so that a YAML file can name it. Must not know: attention.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_burst.megatron import specs
from megatron_burst.megatron.checks import translation
from megatron_burst.megatron.log import speak
from megatron_burst.recipes import packed
from megatron_burst.recipes.kinds import in_words_of, words_of


def burst_layer_spec(
    config: Any,
    vp_stage: int | None = None,
    *,
    base: Any = None,
    before: dict[str, Any] | None = None,
    **choices: Any,
) -> Any:
    """`megatron_burst.megatron.specs.burst_layer_spec`, with errors in the words of a recipe.

    before: what `apply_burst` found in settings that it changed; only another call reads it.
    ``choices`` are fields of `BurstConfig`, and win over whatever flags there are.
    """
    speak()
    with in_words_of(config):
        layers = specs.burst_layer_spec(config, vp_stage, base=base, **choices)
    translation.speak_of(functools.partial(words_of, config))
    packed.serve()
    return layers


def is_ours(spec: Any) -> bool:
    """Is a layer spec what `apply_burst` makes?"""
    return isinstance(spec, functools.partial) and spec.func is burst_layer_spec


def fields_of(spec: functools.partial) -> dict[str, Any]:
    """The fields of `BurstConfig` that a recipe states."""
    return {name: x for name, x in spec.keywords.items() if name not in ("base", "before")}


def choices_of(spec: functools.partial) -> dict[str, Any]:
    """What `apply_burst` was given, as it takes it."""
    choices = fields_of(spec)
    intra = choices.pop("intra_size", None)
    return choices if intra is None else choices | {"intra": intra}
