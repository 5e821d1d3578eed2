"""Layers, states and rivals that are measured, as plain data.

A layer is described by the data that ranks exchange in forward and backward. If heads are shared,
these are all outputs of its input projection, and its output before the output projection. If
states are sent, these are the maps of its pieces and their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

FORMS = ("scalar", "vector", "matrix")
LAYOUTS = ("contiguous", "zigzag")
ACTIVATION, STATE = 2, 4  # bytes of an entry: bfloat16 and float32
GRID, RATES = (2, 4), "200M/800M"
ALGORITHMS = ("ring", "all_gather", "scan", "two_level", "auto")
ALL_TO_ALL, GATHER = "all-to-all of heads", "all-gather of torch"
CONVOLUTION = "rows of the convolution"
GROUPS = 8  # groups of B and C in Mamba-2


class Layer(NamedTuple):
    """One form of decay and its layer.

    Attributes:
        name: Name of the layer.
        sections: Outputs of the input projection: a name, and channels as multiples of
            (heads x width, groups x width, heads).
        convolved: Sections under the short convolution.
        joined: True if one exchange carries all sections.
    """

    name: str
    sections: tuple[tuple[str, tuple[int, int, int]], ...]
    convolved: tuple[str, ...]
    joined: bool

    def channels(self, heads: int, width: int) -> tuple[int, ...]:
        """Return the channels of each section, for `heads` heads of this width; groups <= heads."""
        sizes = heads * width, min(GROUPS, heads) * width, heads
        return tuple(
            sum(n * size for n, size in zip(counts, sizes, strict=True))
            for _, counts in self.sections
        )


_WHOLE, _GROUP, _HEAD = (1, 0, 0), (0, 1, 0), (0, 0, 1)
LAYERS = {
    "scalar": Layer(
        "Mamba-2", (("z", _WHOLE), ("x", _WHOLE), ("B", _GROUP), ("C", _GROUP), ("dt", _HEAD)),
        convolved=("x", "B", "C"), joined=False,
    ),
    "vector": Layer(
        "GLA",
        (("q", _WHOLE), ("k", _WHOLE), ("v", _WHOLE), ("gate", _WHOLE), ("decay", _WHOLE)),
        convolved=(), joined=True,
    ),
    "matrix": Layer(
        "GatedDeltaNet",
        (("q", _WHOLE), ("k", _WHOLE), ("v", _WHOLE), ("z", _WHOLE), ("beta", _HEAD),
         ("alpha", _HEAD)),
        convolved=("q", "k", "v"), joined=True,
    ),
}  # fmt: skip


class Setting(NamedTuple):
    """One cell: a form of decay, a layout, `heads` states of width x width, tokens per rank."""

    form: str
    layout: str
    heads: int = 16
    width: int = 128
    tokens: int = 4096

    @property
    def state_bytes(self) -> int:
        return self.heads * self.width**2 * STATE

    @property
    def transition_bytes(self) -> int:
        """Return bytes of the transition of one piece."""
        return self.heads * {"scalar": 1, "vector": self.width, "matrix": self.width**2}[
            self.form
        ] * STATE  # fmt: skip

    @property
    def convolved(self) -> int:
        """Return channels of the short convolution."""
        layer = LAYERS[self.form]
        section_channels = zip(layer.sections, layer.channels(self.heads, self.width), strict=True)
        return sum(n for (name, _), n in section_channels if name in layer.convolved)

    @property
    def words(self) -> str:
        return f"{self.form}, {self.layout}, {self.heads} heads of {self.width}"

    def exchanged(self, size: int) -> tuple[int, int]:
        """Return bytes that each rank sends to each other rank before and after the layer.

        Heads are shared; backward sends the same bytes.
        """
        channels = sum(LAYERS[self.form].channels(self.heads, self.width))
        channel_bytes = self.tokens * ACTIVATION // size
        return channels * channel_bytes, self.heads * self.width * channel_bytes


def refusal(setting: Setting, rival: str, size: int) -> str | None:
    """Return the reason why a rival cannot run here, or None."""
    if rival == ALL_TO_ALL and setting.heads % size:
        return f"{size} ranks cannot share {setting.heads} heads"
    if rival == CONVOLUTION and not setting.convolved:
        return "the layer has none"
    return None


def settings(quick: bool) -> list[Setting]:
    """Return all cells, large states first; some of them if `quick`."""
    if quick:
        return [Setting("matrix", "contiguous"), Setting("scalar", "zigzag", 4, 64)]
    large = [Setting(form, layout) for form in FORMS for layout in LAYOUTS]
    small = [Setting(form, layout, 4, 64) for form in FORMS[::2] for layout in LAYOUTS]
    return large + small
