# SPDX-License-Identifier: Apache-2.0
"""Replacements of functions of Megatron and torch: making, checking and undoing them.

The registry of patches is one of the two pieces of process-wide state of the package. A set of
patches is applied completely or not at all, and removed completely. There is an oldest supported
version of Megatron-Core, but no newest version. Instead, each patch checks the function that it
replaces, and the error names Megatron's version and the function.

A seam is a function of Megatron that a source patch of `patches/` has decorated (see module
`seam`). If a function has a seam, its replacement is stored in the seam. A Megatron source tree may
have only some of the seams.

The module also contains the package's log, which does not depend on the script's log level, and
translates flags in error messages to settings of recipes. Megatron-Core is imported inside the
functions, because the command line and recipes import this module before they need Megatron.
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
from .run_state import RunState

_installed: dict[str, PatchSet] = {}


class Wrap(NamedTuple):
    """A replacement of a function of a module or a class.

    Attributes:
        owner: The module or class.
        name: The function's name.
        parameters: The parameters that the function must have.
        around: The replacement. It gets the original function, then the arguments of the call.
    """

    owner: Any
    name: str
    parameters: Sequence[str]
    around: Callable[..., Any]


@dataclass
class PatchSet:
    """A named group of replacements that are undone together.

    Attributes:
        name: The name in the registry.
        run: State that the replacements share until they are undone.
    """

    name: str
    run: RunState = field(default_factory=RunState)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def replace(self, owner: object, attribute: str, value: object) -> object:
        """Set `owner.attribute` and return its old value.

        Raises:
            AttributeError: The owner has no such attribute.
        """
        previous = inspect.getattr_static(owner, attribute)
        setattr(owner, attribute, value)
        self._undo.append(lambda: setattr(owner, attribute, previous))
        return previous

    def replace_function(self, home: object, name: str, value: Callable) -> None:
        """Replace a module-level function in its module and in modules that imported it by name.

        A module that is imported later may import the replacement, so undoing searches all loaded
        modules again.
        """
        original = getattr(home, name)
        rename_everywhere(name, original, value)
        self._undo.append(lambda: rename_everywhere(name, value, original))

    def wrap(
        self, owner: Any, name: str, parameters: Sequence[str], around: Callable[..., Any]
    ) -> None:
        """Replace the function `owner.name` by `around`. Arguments are the fields of `Wrap`.

        Raises:
            RuntimeError: There is no such function, or it lacks one of the parameters.
        """
        original = require_function(owner, name, parameters)

        @functools.wraps(original)
        def replacement(*args: Any, **named: Any) -> Any:
            return around(original, *args, **named)

        if hasattr(original, "cache_clear"):  # Megatron calls cache_clear() of its cached methods
            vars(replacement)["cache_clear"] = lambda: None
        if inspect.ismodule(owner):
            self.replace_function(owner, name, replacement)
        else:
            self.replace(owner, name, replacement)

    def on_undo(self, action: Callable[[], object]) -> None:
        """Register `action`, which is called when the replacements are undone."""
        self._undo.append(action)

    def undo(self, first: int = 0) -> None:
        """Undo replacements in reverse order; by default all, otherwise from number `first` on."""
        while len(self._undo) > first:
            self._undo.pop()()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undo the replacements that were made inside the context, if it raises an exception."""
        first = len(self._undo)
        try:
            yield
        except BaseException:
            self.undo(first)
            raise


def wrap_steps(
    patches: PatchSet, around: Callable[[Callable[..., Any], dict[str, Any]], Any]
) -> None:
    """Wrap the function of Megatron's schedules that runs all micro-batches of a step.

    Args:
        patches: the set of patches.
        around: called as `around(run, named)` in place of `run(**named)`, where `run` is Megatron's
            function, for training and evaluation. The wrapper that was added last is called first.
    """
    from megatron.core.pipeline_parallel import schedules

    def chosen(original: Callable, *args: Any, **kwargs: Any) -> Callable:
        run = original(*args, **kwargs)
        return functools.wraps(run)(lambda **named: around(run, named))

    patches.wrap(schedules, "get_forward_backward_func", [], chosen)


def rename_everywhere(name: str, old: object, new: object) -> None:
    """Bind `name` to `new` in every loaded module that binds it to `old`."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        # Read the dict, not the attribute: reading an attribute of a lazy module may import it.
        if namespace is not None and namespace.get(name) is old:
            setattr(module, name, new)


@contextmanager
def instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace the method `name` of an instance or class by `function` inside the context."""
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
    """Yield a new set for replacements. An exception within the context undoes all of them."""
    patches = PatchSet(name)
    with patches.undone_on_error():
        yield patches
    _installed[name] = patches


def training_available() -> bool:
    """Return whether Megatron-LM (`megatron.training`) can be imported."""
    return importlib.util.find_spec("megatron.training") is not None


def installed(name: str) -> PatchSet | None:
    """Return the installed set of patches with this name; None if it is not installed."""
    return _installed.get(name)


def run_state() -> RunState:
    """Return the state of this run, which the set of patches "burst" holds.

    Without these patches, return a new object with the default values, which is not stored.
    """
    patches = installed("burst")
    return patches.run if patches else RunState()


def skips_megatrons_checks() -> bool:
    """Return whether to skip checks that apply only to Megatron's own context parallelism.

    The result is True after `install(layout)` or a first `configure_model`, and inside
    `selecting_burst(True)`.
    """
    state = run_state()
    return state.layout is not None or state.selecting


@contextmanager
def selecting_burst(chosen: bool) -> Iterator[None]:
    """Record `chosen`: whether configurations made inside the context select BurstAttention."""
    state = run_state()
    before, state.selecting = state.selecting, chosen
    try:
        yield
    finally:
        state.selecting = before


def remove(name: str) -> bool:
    """Undo the set of patches with this name; return False if it was not installed."""
    patches = _installed.pop(name, None)
    if patches is None:
        return False
    patches.undo()
    return True


OLDEST = (0, 16)  # the oldest Megatron-Core that was tested
# The first Megatron-Core whose layers of linear attention, Mamba and DSA are supported at CP > 1.
HYBRID_SINCE = (0, 19)


def core_version() -> tuple[int, ...]:
    """Return (major, minor) of Megatron-Core's version."""
    import megatron.core

    return tuple(int(part) for part in megatron.core.__version__.split(".")[:2])


def check_version() -> None:
    """Raise `RuntimeError` for a Megatron-Core older than `OLDEST`."""
    import megatron.core

    if core_version() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} is older than {oldest}, the oldest version "
            "that megatron_burst supports; upgrade megatron-core"
        )


def path_of(cls: type) -> str:
    """Return module and qualified name of a class, joined by a dot."""
    return f"{cls.__module__}.{cls.__qualname__}"


def require_parameters(function: Callable, names: Sequence[str], symbol: str) -> None:
    """Raise `RuntimeError` unless `function` has at least the parameters `names`."""
    import megatron.core

    parameters = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in parameters]
    if missing:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__}: {symbol} has the parameters {parameters}, "
            f"but lacks {missing}; this version of megatron_burst does not support it: use a "
            "tested version (megatron-burst doctor)"
        )


def given_to(function: Callable, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `function`, by name."""
    return bound_to(function, args, named).arguments


def bound_to(
    function: Callable, args: Sequence[Any], named: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the bound arguments of a call of `function`. The caller may change them."""
    return signature_of(function).bind(*args, **named)


signature_of = functools.lru_cache(maxsize=128)(inspect.signature)


def require_function(home: Any, name: str, parameters: Sequence[str]) -> Callable:
    """Return the function `name` of a module or class of Megatron.

    Raises:
        RuntimeError: There is no such function, or it lacks one of `parameters`; the message names
            Megatron's version and the symbol.
    """
    import megatron.core

    symbol = f"{home.__name__.removeprefix('megatron.')}.{name}"
    function = getattr(home, name, None)
    if function is None:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} has no {symbol}; this version of "
            "megatron_burst does not support it: use a tested version (megatron-burst doctor)"
        )
    require_parameters(function, parameters, symbol)
    return function


def lacking(home: Any, name: str, parameters: Sequence[str]) -> str | None:
    """Return the message of the error that `require_function` raises; None without an error."""
    try:
        require_function(home, name, parameters)
    except RuntimeError as error:
        return str(error)
    return None


class LocatedSeam(NamedTuple):
    """A decorated function (seam) in the imported Megatron.

    Attributes:
        owner: The module or class of the function.
        name: The function's name.
        call: The decorated function.
        seam: The original function and its replacement.
    """

    owner: Any
    name: str
    call: Callable[..., Any]
    seam: Seam


def patched_places() -> list[SeamPlace]:
    """Return the functions of the imported Megatron that have a seam.

    A seam is a decorator through which this package can replace the function (see module `seam`).
    """
    return [place for place, _ in _seams()]


@contextmanager
def opened(patches: PatchSet, purpose: str | None = None) -> Iterator[None]:
    """Replace decorated functions (seams) by their originals inside the context.

    The context can then wrap the originals like other functions. On exit, each wrapper is stored in
    its seam, and the decorated function is restored. Removal of `patches` clears the seams. A tree
    without seams is unchanged. An exception within the context undoes its replacements.

    Args:
        patches: the set of patches.
        purpose: `SeamPlace.purpose` of the seams to replace, which one patch in `patches/` adds;
            None for all seams.
    """
    seams = [located for place, located in _seams() if purpose in (None, place.purpose)]
    with patches.undone_on_error():
        patches.on_undo(lambda: _close(seams, empty=True))
        for located in seams:
            setattr(located.owner, located.name, located.seam.bare)
        yield
        _close(seams, empty=False)


def _close(seams: list[LocatedSeam], empty: bool) -> None:
    """Restore the decorated functions, and store or clear the replacements in their seams."""
    for owner, name, call, seam in seams:
        present = inspect.getattr_static(owner, name)
        seam.inner = None if empty or present is seam.bare else present
        setattr(owner, name, call)
        if inspect.ismodule(owner):  # a module may have imported another function meanwhile
            rename_everywhere(name, present, call)
            rename_everywhere(name, seam.bare, call)


def _seams() -> list[tuple[SeamPlace, LocatedSeam]]:
    """Return the seams of Megatron, without modules of megatron.training that are not imported.

    Code that replaces functions of megatron.training imports it first. A script on Megatron-Core
    alone does not need megatron.training, so it is not imported here.
    """
    places = [p for p in PLACES if p.module.startswith("megatron.core") or p.module in sys.modules]
    return [(place, located) for place in places if (located := _find(place)) is not None]


def _find(place: SeamPlace) -> LocatedSeam | None:
    owner: Any = importlib.import_module(place.module)
    *classes, name = place.name.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name, None)
    call = inspect.getattr_static(owner, name, None)
    seam = inside(call)
    return LocatedSeam(owner, name, call, seam) if seam is not None else None


_NAME = "megatron_burst"


WIDEST = 120  # characters of a line of the log
_PREFIX, _INDENT = f"> {_NAME}: ", "    "


class _Handler(logging.Handler):
    """A handler that writes to the current standard output, which tests may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print("\n".join(_PREFIX + line for line in folded(record.getMessage())), flush=True)


def folded(line: str) -> list[str]:
    """Split a log message into lines of at most `WIDEST` characters.

    A message that is too long is split at " | ". The first line contains as many parts as fit; each
    other part starts a new indented line.
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


def log_once(state: RunState, line: str, subject: str | None = None) -> None:
    """Log a line on rank 0, once in a run.

    Args:
        state: The state of the run.
        line: The line.
        subject: Key of the line: only one line per key is logged. Default: the line itself.
    """
    subject = subject or line
    if subject not in state.logged:
        state.logged.add(subject)
        log(line)


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


def translate_with(translate: Callable[[str], str] | None) -> None:
    """Set the function that `user_text` applies to messages until `uninstall`; None unsets it."""
    run_state().translate_error = translate


def user_error(text: str) -> ValueError:
    """Return a `ValueError` with the message `user_text(text)`."""
    return ValueError(user_text(text))


def user_text(text: str) -> str:
    """Return `text`. In a recipe, names of recipe settings replace the flags."""
    translate = run_state().translate_error
    return text if translate is None else translate(text)
