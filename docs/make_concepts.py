"""Write docs/concepts/*.svg: `make gallery`.

Every arrow, number and colour is read from the schedules, layouts, masks and sizes of the package.
`captions` returns the numbers as text. A test checks that the pages print this text.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drawings import layouts, packing, rings, sides, store
from matplotlib import style

from megatron_burst.plugins.tools.lanes import STYLE

FOLDER = Path(__file__).parent / "concepts"
PAGES = {"ring": rings, "sides": sides, "layouts": layouts, "store": store, "packing": packing}
DRAWINGS = {name: draw for page in PAGES.values() for name, draw in page.DRAWINGS.items()}


def captions() -> dict[str, list[str]]:
    """Return the numbers of the drawings of each page, as the page must print them."""
    return {name: page.captions() for name, page in PAGES.items()}


def save(name: str, folder: Path, form: str = "svg") -> Path:
    """Write one of DRAWINGS into a folder, with the same bytes in each run, and return its path."""
    path = folder / f"{name}.{form}"
    with style.context(["default", STYLE | {"svg.hashsalt": name}], after_reset=True):
        metadata = {"Date": None, "Creator": None} if form == "svg" else {}
        DRAWINGS[name]().savefig(path, metadata=metadata, dpi=110)
    return path


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in DRAWINGS:
        save(name, FOLDER)
    for page, lines in captions().items():
        print(f"docs/concepts/{page}.md must print:", *lines, sep="\n  - ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
