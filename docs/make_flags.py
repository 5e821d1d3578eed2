"""Write the table of flags into README.md: `python docs/make_flags.py`.

The flags, their values and what they mean are those of `BurstConfig`; a test compares.
"""

from pathlib import Path

from megatron_burst import flags

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- flags: docs/make_flags.py -->\n", "<!-- end of flags -->"


def written(page: str) -> str:
    """The page with the table of today between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{flags.table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
    print(f"wrote the flags into {README.name}")
