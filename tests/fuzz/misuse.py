"""Wrong uses of the public API, and what each must be told: `python -m tests.fuzz misuse`.

Every one is a ValueError whose message has the words: the argument, what arrived, what would work.
A TypeError is right where the signature is wrong, and for a copy of groups. Masks by themselves
have their table in `tests/masks/test_masks.py`.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from workers import Workers

from .tally import Tally
from .wrong_calls import CALLS
from .wrong_parts import GROUPS, LAYOUTS, OTHERS


class Misuse(NamedTuple):
    name: str
    call: Callable[[], object]
    words: tuple[str, ...]
    error: type[Exception] = ValueError


TABLES = {"call": CALLS, "groups": GROUPS, "layout": LAYOUTS, "others": OTHERS}
ALL = {f"{part}: {row[0]}": Misuse(*row) for part, table in TABLES.items() for row in table}


def faults(name: str) -> list[str]:
    """What is wrong with what this misuse is told."""
    misuse = ALL[name]
    try:
        misuse.call()
    except misuse.error as error:
        missing = [word for word in misuse.words if word not in str(error)]
        return [f"the message has no {missing}: {error}"] if missing else []
    except Exception as error:
        return [f"not a {misuse.error.__name__}: {type(error).__name__}: {error}"]
    return ["nothing was said"]


def search(names: Iterable[str], _: Callable[[int], Workers] | None = None) -> Tally:
    """Try these misuses."""
    tally = Tally("misuse")
    for name in names:
        tally.add([name.split(":")[0]], faults(name), ALL[name].words, f"'{name}'")
    return tally
