# SPDX-License-Identifier: Apache-2.0
"""Fields of a `config.json`: type checks, and a record of the fields that code has read.

An ignored field that describes layers would silently give a wrong model. `Fields.check_unread`
therefore raises ValueError for such fields if no code has read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST = 10**9  # maximum of a width or a count
LARGEST = 10**15  # maximum of other numbers; rotary bases for long contexts exceed 10**9
# Pattern of field names that may describe layers: experts, windows, chunks, patterns, per-layer
# values.
SUSPECT = re.compile(
    r"expert|moe|window|chunk|pattern|block|layer_type|per_layer|layers|interleave|interval|period"
    r"|_freq|_every|hybrid|mamba|ssm|conv|^linear_|^local|^global|sparse|compress|^index_|^indexer"
    r"|loop|recurren|altup|laurel|^swa_|^mtp|sink|^use_cla|layer_group|attn_(type|layer|ind)|idxs$"
    r"|mixer"
)
# Pattern within such names if the value does not affect the shape.
HARMLESS = re.compile(
    r"aux_loss|z_loss|_coef$|capacity|drop|jitter|renorm|_dtype$|kernel$|kernels$|feed_forward"
    r"|norm_min|scaling_factor|fp32|overlap|rope|rotary|router|_mode$|use_mixed_mlp|order_of_interleaved|use_parallel|_act$|initializer|predict_layers$"
    r"|inference|cache|expert_bias|_group$|score|combine|fused|tensor_parallel|^num_hidden_layers$"
    r"|scale$|_multiplier|^linear_(a_log|dt_|allow)|^mamba_dt|^mtp_|^moe_gate$|aux_free"
)
# Names of fields within nested objects, such as DBRX's ffn_config.
OF_EXPERTS = re.compile(r"expert|moe")


class Missing(ValueError):
    """Raised if a required field is absent."""


class Fields(Mapping[str, Any]):
    """Fields of a config.json, without null values. Records which fields are read.

    Args:
        values: Field name -> value.
        name: Name of the file, for errors.
        aliases: Standard field name -> name in the configuration class of the model type.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        name: str,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.values_by_name = {key: x for key, x in values.items() if x is not None}
        self.aliases = dict(aliases or {})
        self.name = name
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        real = key if key in self.values_by_name else self.aliases.get(key, key)
        value = self.values_by_name[real]
        self._read.add(real)
        return value

    def __iter__(self) -> Any:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def __contains__(self, key: object) -> bool:
        return key in self.values_by_name or self.aliases.get(str(key)) in self.values_by_name

    def size(self, *keys: str) -> int:
        """Return the integer in one of several fields with the same meaning; 0 if none is set.

        A list of equal numbers counts as one number. Raises ValueError if the fields contradict
        each other.
        """
        size = 0
        for key in keys:
            value = self.get(key, 0)
            if (
                isinstance(value, (list, tuple))
                and len(value) > 1
                and len(set(map(str, value))) == 1
            ):
                value = value[0]
            value = self._of(key, value, int, "an integer >= 0")
            if value > MOST:
                raise ValueError(f"{self.name}: {key!r} must be at most {MOST:,}, got {value:.3g}")
            if size and value not in (0, size):
                raise ValueError(
                    f"{self.name}: {key!r} is {value}, but a field with the same meaning is {size};"
                    f" set {', '.join(keys)} to equal values"
                )
            size = size or value
        return size

    def needed(self, *keys: str) -> int:
        """Return `size(*keys)`; raise `Missing` if none of the fields exists."""
        if not any(key in self for key in keys):
            raise Missing(f"{self.name}: has no {keys[0]!r}, which is required")
        return self.size(*keys)

    def number(self, key: str) -> float:
        """Return the number in a required field as a float. It must be from 0 to `LARGEST`."""
        number = self[key]
        if type(number) not in (int, float) or not 0 <= number <= LARGEST:
            raise ValueError(
                f"{self.name}: {key!r} must be a number from 0 to {LARGEST:,}, got {number!r:.60}"
            )
        return float(number)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean in a field; `default` if the field is absent."""
        return self._of(key, self.get(key, default), bool, "true or false")

    def text(self, key: str, default: str = "") -> str:
        """Return the string in a field; `default` if the field is absent."""
        return self._of(key, self.get(key, default), str, "a string")

    def items_of(self, key: str, kind: type) -> list[Any]:
        """Return the list of `kind` (int or str) in a field; [] if the field is absent."""
        value = self.get(key, [])
        entries = list(value) if type(value) is tuple else self._of(key, value, list, "a list")
        expected = {int: "integers >= 0", str: "strings"}[kind]
        return [self._of(key, item, kind, f"a list of {expected}") for item in entries]

    def object_of(self, key: str) -> Fields:
        """Return the nested object in a field; empty if the field is absent or false."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{self.name}: {key!r} must be an object, got {value!r:.60}")
        return Fields(value, f"{self.name}: {key}")

    def _of(self, key: str, value: Any, kind: type, expected: str) -> Any:
        if type(value) is not kind or (kind is int and value < 0):
            raise ValueError(f"{self.name}: {key!r} must be {expected}, got {value!r:.60}")
        return value

    def accept(self, *keys: str) -> None:
        """Mark fields as read, for example because another field has the same information."""
        self._read.update(keys, (self.aliases.get(key, key) for key in keys))

    def unread(self, layers: int) -> list[str]:
        """Return the names of fields that may describe layers but that no code has read.

        Args:
            layers: Number of layers of the model; a list of this length may describe layers.
        """
        unread = []
        for key, value in self.values_by_name.items():
            per_layer = isinstance(value, (list, tuple, dict)) and len(value) == layers > 4
            suspect = per_layer or (SUSPECT.search(key) and not HARMLESS.search(key))
            nested = map(str, value) if isinstance(value, dict) else ()
            suspect = suspect or any(map(OF_EXPERTS.search, nested))
            if suspect and key not in self._read and not _neutral(value):
                unread.append(key)
        return unread

    def check_unread(self, layers: int) -> None:
        """Raise ValueError if `unread` returns any fields."""
        if wrong := self.unread(layers):
            listed = ", ".join(f"{key!r} ({self.values_by_name[key]!r:.60})" for key in wrong)
            raise ValueError(
                f"{self.name}: unknown fields {listed}, which may change the number of experts, "
                "windows or layers; describe the model by a Megatron command after -- instead"
            )


def _neutral(value: Any) -> bool:
    """Return whether a value (such as false, 0, 1 or an empty list) has no effect on the shape."""
    if isinstance(value, (list, tuple, dict, str)):
        return not value
    return value is False or (value is not True and value in (0, 1))
