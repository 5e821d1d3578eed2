# SPDX-License-Identifier: Apache-2.0
"""Complete texts of masks and layouts, which are equal only for equal objects.

The `repr` of a dataclass is not complete: numpy and torch abbreviate long arrays and round numbers.
Ranks compare complete texts, and caches use them as keys.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


class ComparedByText:
    """Base class of masks and layouts, which are equal if their complete texts are equal."""

    @property
    def complete_text(self) -> str:
        """Text that two objects share only if they are equal.

        Masks and layouts of this package have a complete `repr`, which is their text.
        """
        if type(self).__module__.startswith(f"{__name__.partition('.')[0]}."):
            return repr(self)
        return complete_text_of(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComparedByText) and self.complete_text == other.complete_text

    def __hash__(self) -> int:
        return hash(self.complete_text)


def text_of_fact(value: object) -> str:
    """Return the text of a value that ranks compare: a complete text, or the `repr`."""
    return value.complete_text if isinstance(value, ComparedByText) else repr(value)


def complete_text_of(value: Any) -> str:
    """Return a text that two values share only if they are equal.

    The text of an array has a digest of all its elements. The text of a dataclass has all fields
    except those with `compare=False`, and its `repr` if the class defines one. The text of another
    object is its `repr`, with complete arrays.

    Args:
        value: A mask, a layout, or a value of one of their fields.
    """
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16)
        return f"array({value.dtype}, {value.shape}, {digest.hexdigest()})"
    torch: Any = sys.modules.get("torch")  # this folder does not import torch
    if torch is not None and isinstance(value, torch.Tensor):
        tensor: Any = value
        host = tensor.detach().cpu().contiguous().flatten()
        digest = complete_text_of(host.view(torch.uint8).numpy())
        return f"tensor({tensor.dtype}, {tuple(tensor.shape)}, {digest})"
    if is_dataclass(value) and not isinstance(value, type):
        compared = [field.name for field in fields(value) if field.compare]
        texts = ", ".join(f"{name}={_nested(getattr(value, name))}" for name in compared)
        text = f"{type(value).__qualname__}({texts})"
        generated = hasattr(type(value).__repr__, "__wrapped__")  # by `dataclass`
        return text if generated else f"{text} {_repr(value)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_nested, value))})"
    if isinstance(value, Mapping):
        items = (f"{_nested(key)}: {_nested(item)}" for key, item in value.items())
        return f"{type(value).__name__}({', '.join(items)})"
    return _repr(value)


def _nested(value: Any) -> str:
    return value.complete_text if isinstance(value, ComparedByText) else complete_text_of(value)


def _repr(value: Any) -> str:
    """Return the `repr` of a value with complete numpy arrays."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(value)
