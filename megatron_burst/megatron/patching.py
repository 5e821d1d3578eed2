# SPDX-License-Identifier: Apache-2.0
"""What has been replaced inside Megatron and torch, how it is restored, and what that relies on.

The registry of patches is one of the two pieces of process-wide state of the package. A set of
patches is applied completely or not at all, and removed completely. There is an oldest supported
version of Megatron-Core but no newest one: each patch checks the function that it replaces, and the
error names Megatron's version and the function. In a Megatron with the patches of `patches/` the
replacements go into its seams; a tree may have only part of them.

Also what every part of a training script shares: log lines that do not depend on the script's log
level, and the translation of errors for users of recipes, who have settings in place of flags.
Megatron-Core is imported inside the functions, because the command line and recipes import this
module before they need Megatron.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ..seam import PLACES, Seam, SeamPlace, inside

_installed: dict[str, PatchSet] = {}


class Wrap(NamedTuple):
    """A function of a module or a class, the parameters that it must have, and what runs in its
    place: `around`, which gets the function before what it is called with.
    """

    owner: Any
    name: str
    parameters: Sequence[str]
    around: Callable[..., Any]


@dataclass
class PatchSet:
    """A named group of replacements that are undone together.

    `notes` holds the state that these replacements share while they are installed.
    """

    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def replace(self, owner: object, attribute: str, value: object) -> object:
        """Set `owner.attribute` and return its old value; `AttributeError` if it had none."""
        previous = inspect.getattr_static(owner, attribute)
        setattr(owner, attribute, value)
        self._undo.append(lambda: setattr(owner, attribute, previous))
        return previous

    def replace_function(self, home: object, name: str, value: Callable) -> None:
        """Replace a module-level function in its home module and wherever it was from-imported.

        Modules imported later take the replacement from the home module, so undoing looks at
        every loaded module again.
        """
        original = getattr(home, name)
        rename_everywhere(name, original, value)
        self._undo.append(lambda: rename_everywhere(name, value, original))

    def wrap(
        self, owner: Any, name: str, parameters: Sequence[str], around: Callable[..., Any]
    ) -> None:
        """Replace a function as a `Wrap` says, whose fields these are.

        Raises `RuntimeError` unless there is one, with (at least) these parameters.
        """
        original = require_function(owner, name, parameters)

        @functools.wraps(original)
        def replacement(*args: Any, **named: Any) -> Any:
            return around(original, *args, **named)

        if hasattr(original, "cache_clear"):  # Megatron empties the cache of its own method
            vars(replacement)["cache_clear"] = lambda: None
        if inspect.ismodule(owner):
            self.replace_function(owner, name, replacement)
        else:
            self.replace(owner, name, replacement)

    def on_undo(self, action: Callable[[], object]) -> None:
        """Run `action` when the set is removed."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything, newest first."""
        while self._undo:
            self._undo.pop()()


def wrap_steps(
    patches: PatchSet, around: Callable[[Callable[..., Any], dict[str, Any]], Any]
) -> None:
    """Add to a set of patches `around(run, named)` in place of every step or evaluation
    `run(**named)` of Megatron's schedules. The last one that was added runs first.
    """
    from megatron.core.pipeline_parallel import schedules

    def chosen(original: Callable, *args: Any, **kwargs: Any) -> Callable:
        run = original(*args, **kwargs)
        return functools.wraps(run)(lambda **named: around(run, named))

    patches.wrap(schedules, "get_forward_backward_func", [], chosen)


def rename_everywhere(name: str, old: object, new: object) -> None:
    """Bind `name` to `new` in every loaded module where it is bound to `old`."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        # Read the dict, not the attribute: reading an attribute of a lazy module may import it.
        if namespace is not None and namespace.get(name) is old:
            setattr(module, name, new)


@contextmanager
def instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, this instance's method `name` is `function`."""
    before = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


@contextmanager
def patch_set(name: str) -> Iterator[PatchSet]:
    """Collect replacements into a new set; an exception inside undoes all of them."""
    patches = PatchSet(name)
    try:
        yield patches
    except BaseException:
        patches.undo()
        raise
    _installed[name] = patches


def training_available() -> bool:
    """Whether Megatron-LM (`megatron.training`) can be imported."""
    return importlib.util.find_spec("megatron.training") is not None


def installed(name: str) -> PatchSet | None:
    """The set of that name, or None."""
    return _installed.get(name)


def notes() -> dict[str, Any]:
    """What the parts of BurstAttention share until `uninstall`: the notes of its set of patches, or
    none that stay.
    """
    patches = installed("burst")
    return patches.notes if patches else {}


_CHOOSING = "choosing"


def burst_chosen() -> bool:
    """Whether this run has chosen BurstAttention, so that configurations need not meet what only
    Megatron's own context parallelism requires.

    True after `install(layout)` or a first `configure`, and inside `choosing(True)`.
    """
    return "layout" in notes() or notes().get(_CHOOSING, False)


@contextmanager
def choosing(chosen: bool) -> Iterator[None]:
    """Inside, a configuration is made for which BurstAttention is chosen, if `chosen`."""
    state = notes()
    before = state.get(_CHOOSING, False)
    state[_CHOOSING] = chosen
    try:
        yield
    finally:
        state[_CHOOSING] = before


def remove(name: str) -> bool:
    """Undo the set of that name; False when it was not installed."""
    patches = _installed.pop(name, None)
    if patches is None:
        return False
    patches.undo()
    return True


OLDEST = (0, 16)  # of Megatron-Core: no older version was ever tested


def core_version() -> tuple[int, ...]:
    """Major and minor version of Megatron-Core."""
    import megatron.core

    return tuple(int(part) for part in megatron.core.__version__.split(".")[:2])


def check_version() -> None:
    """Raise `RuntimeError` for a Megatron-Core older than `OLDEST`."""
    import megatron.core

    if core_version() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} is older than {oldest}, the oldest that "
            "megatron_burst works with; upgrade megatron-core"
        )


def path_of(cls: type) -> str:
    """Return the module and the qualified name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def require_parameters(function: Callable, names: Sequence[str], symbol: str) -> None:
    """Raise `RuntimeError` unless `function` takes (at least) the parameters `names`."""
    import megatron.core

    parameters = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in parameters]
    if missing:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__}: {symbol} takes {parameters}, without "
            f"{missing}; this version of megatron_burst does not support it"
        )


def given_to(function: Callable, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `function`, by name."""
    return bound_to(function, args, named).arguments


def bound_to(
    function: Callable, args: Sequence[Any], named: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call of `function`, which may be changed before it is made."""
    return signature_of(function).bind(*args, **named)


signature_of = functools.lru_cache(maxsize=128)(inspect.signature)


def require_function(home: Any, name: str, parameters: Sequence[str]) -> Callable:
    """The function `name` of a module of Megatron, if it takes `parameters`.

    Raises `RuntimeError` naming Megatron's version and the symbol otherwise.
    """
    import megatron.core

    symbol = f"{home.__name__.removeprefix('megatron.')}.{name}"
    function = getattr(home, name, None)
    if function is None:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} has no {symbol}; this version of "
            "megatron_burst does not support it"
        )
    require_parameters(function, parameters, symbol)
    return function


class FoundSeam(NamedTuple):
    """A seam of the imported Megatron: owner (a module or a class), name, function, state."""

    owner: Any
    name: str
    call: Callable[..., Any]
    seam: Seam


def patched_places() -> list[SeamPlace]:
    """The places that have a seam in this Megatron; all of `seam.PLACES` in a patched tree."""
    return [place for place, _ in _seams()]


@contextmanager
def opened(patches: PatchSet, purpose: str | None = None) -> Iterator[None]:
    """Inside, functions with a seam are exposed without it, so that they can be replaced as usual.

    On exit each replacement moves into its seam, and the seam is back in place. purpose: only the
    seams of that patch of the series; None for all. Removing `patches` empties the seams. A
    tree without seams is left alone.
    """
    seams = [one for place, one in _seams() if purpose in (None, place.purpose)]
    patches.on_undo(lambda: _close(seams, empty=True))
    for one in seams:
        setattr(one.owner, one.name, one.seam.bare)
    yield
    _close(seams, empty=False)


def _close(seams: list[FoundSeam], empty: bool) -> None:
    """Put the seams back in place, around whatever replaced their functions."""
    for owner, name, call, seam in seams:
        now = inspect.getattr_static(owner, name)
        seam.inner = None if empty or now is seam.bare else now
        setattr(owner, name, call)
        if inspect.ismodule(owner):  # a module imported in between may hold either of the others
            rename_everywhere(name, now, call)
            rename_everywhere(name, seam.bare, call)


def _seams() -> list[tuple[SeamPlace, FoundSeam]]:
    """The seams of this Megatron, except those in modules of megatron.training not yet imported.

    Code that replaces functions of megatron.training imports it first. A script on Megatron-Core
    alone does not need megatron.training, so it is not imported here.
    """
    places = [p for p in PLACES if p.module.startswith("megatron.core") or p.module in sys.modules]
    return [(place, one) for place in places if (one := _find(place)) is not None]


def _find(place: SeamPlace) -> FoundSeam | None:
    owner: Any = importlib.import_module(place.module)
    *classes, name = place.name.split(".")
    for one in classes:
        owner = getattr(owner, one, None)
    call = inspect.getattr_static(owner, name, None)
    seam = inside(call)
    return FoundSeam(owner, name, call, seam) if seam is not None else None


_NAME = "megatron_burst"


WIDEST = 120  # characters of a line of the log
_PREFIX, _INDENT = f"> {_NAME}: ", "    "


class _Handler(logging.Handler):
    """Writes to the standard output of the moment, which tests and launchers may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print("\n".join(_PREFIX + line for line in folded(record.getMessage())), flush=True)


def folded(line: str) -> list[str]:
    """The line; one that is too long as a table: first its parts (between " | ") that fit into a
    row, then each of the others in its own.
    """
    room = WIDEST - len(_PREFIX)
    first, *parts = line.split(" | ")
    if len(line) <= room or not parts:
        return [line]
    while len(first) + len(parts[0]) + 3 <= room:
        first += f" | {parts.pop(0)}"
    rows = [textwrap.wrap(_INDENT + part, room, subsequent_indent=2 * _INDENT) for part in parts]
    return [first, *chain(*rows)]


def log(line: str) -> None:
    """Log a line, on rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        logging.getLogger(_NAME).info(line)


def launches_in_order() -> bool:
    """Whether CUDA was told to have one queue for all streams; only lines of the log go by it."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def show_log(patches: PatchSet | None = None) -> None:
    """Show this package's log on standard output, until `patches` (if given) are removed.

    Idempotent.
    """
    logger = logging.getLogger(_NAME)
    if any(isinstance(handler, _Handler) for handler in logger.handlers):
        return
    handler = _Handler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def restore() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]

    if patches is not None:
        patches.on_undo(restore)


_TRANSLATE = "translate errors"


def translate_with(translate: Callable[[str], str] | None) -> None:
    """Apply `translate` to all messages until `uninstall`; None leaves them as they are."""
    notes()[_TRANSLATE] = translate


def user_error(text: str) -> ValueError:
    """The error to raise for a message that names flags."""
    return ValueError(user_text(text))


def user_text(text: str) -> str:
    """Return a message that names flags in the terms of the user: settings in a recipe."""
    translate = notes().get(_TRANSLATE)
    return text if translate is None else translate(text)
