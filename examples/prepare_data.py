"""Converter of text to a Megatron indexed dataset (PREFIX.bin and PREFIX.idx).

`make quickstart` uses this script. You can also run it alone:

    python examples/prepare_data.py                          # source files of the standard library
    python examples/prepare_data.py --data ~/notes           # your own text: a folder or one file
    python examples/prepare_data.py --data corpus/my_prefix  # an existing .bin/.idx, linked
    python examples/prepare_data.py --definitions            # a document per function or class

The script defines the tokens: one per byte (0 to 255), and 256 at the end of each document.
PREFIX.json contains the numbers of documents and tokens, the vocabulary size, and the unigram
entropy in nats per token. PREFIX contains a fingerprint of the source. So an unchanged source is
not built again, and Megatron's index cache is never used for a changed source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

EOD = 256  # end of document; bytes are 0 to 255
FORMAT = 1  # part of the fingerprint, so that a new format builds all datasets again
# The start of a definition at the top level of a Python file, with its decorators.
DEFINITION = re.compile(rb"^(?:(?:@.*\n)*(?:async def|def|class)\b)", re.MULTILINE)
STDLIB_SKIPS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """Source of tokens.

    Attributes:
        name: Name for the dataset's files.
        title: Description for messages.
        files: Files to read as documents; empty for an existing dataset.
        prefix: Path of an existing dataset without its ending, or None.
        skipped: Number of empty or binary files that are not read.
    """

    name: str
    title: str
    files: tuple[Path, ...] = ()
    prefix: Path | None = None
    skipped: int = 0

    def fingerprint(self) -> str:
        """Return eight hex digits of the paths, sizes and modification times of the files."""
        parts = self.files or tuple(Path(f"{self.prefix}{end}") for end in (".bin", ".idx"))
        digest = hashlib.sha256(str(FORMAT).encode())
        for path in parts:
            stat = path.stat()
            digest.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
        return digest.hexdigest()[:8]


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset; PREFIX.json contains all fields but the prefix.

    Attributes:
        prefix: Value of Megatron's --data-path.
        source: Description of the source.
        documents: Number of documents.
        tokens: Number of tokens, including those at the ends of documents.
        vocab_size: The largest token plus one, at least 257.
        unigram_entropy_nats: Entropy of the token frequencies in nats per token.
    """

    prefix: str
    source: str
    documents: int
    tokens: int
    vocab_size: int
    unigram_entropy_nats: float


def find_source(data: str | None) -> Source:
    """Return the source that a path names.

    Args:
        data: Value of DATA or --data; None for the source files of Python's standard library.

    Raises:
        ValueError: The path does not exist or contains no text.
    """
    if data is None:
        return _standard_library()
    path = Path(data).expanduser()
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if all(Path(f"{prefix}{end}").is_file() for end in (".bin", ".idx")):
        return _existing(prefix.resolve())
    if path.is_file():
        path = path.resolve()
        return Source(path.stem, f"the file {path}", files=(path,))
    if path.is_dir():
        return _folder(path.resolve())
    raise ValueError(
        f"DATA (--data) is {data!r}, which does not exist; name a folder of text files, one file, "
        "or a Megatron prefix with both PREFIX.bin and PREFIX.idx"
    )


def _existing(prefix: Path) -> Source:
    """Return the source of an existing Megatron dataset; check the first bytes of its index."""
    with Path(f"{prefix}.idx").open("rb") as index:
        if not index.read(9).startswith(b"MMIDIDX"):
            raise ValueError(
                f"DATA (--data) is {str(prefix)!r}, but {prefix}.idx is not a Megatron index; "
                "write it with Megatron's preprocess_data, or name the text itself"
            )
    return Source(prefix.name, f"the Megatron dataset {prefix}", prefix=prefix)


def _standard_library() -> Source:
    """Return the .py files of this interpreter's standard library, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if not STDLIB_SKIPS & set(p.parts)]
    files = [p for p in files if p.is_file() and p.stat().st_size]
    if not files:
        raise ValueError(
            f"DATA (--data) is not given and this Python has no source files under {root}; "
            "name a folder of text files or one file with DATA"
        )
    version = ".".join(map(str, sys.version_info[:3]))
    title = f"Python {version}'s standard library"
    return Source("python-stdlib", title, tuple(files))


def _folder(root: Path) -> Source:
    """Return the files below `root` that are not hidden, empty or binary.

    A file is binary if its first 8192 bytes contain a NUL byte.
    """
    visible = (
        p
        for p in sorted(root.rglob("*"))
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(root).parts)
    )
    files, skipped = [], 0
    for path in visible:
        with path.open("rb") as file:
            head = file.read(8192)
        if head and b"\0" not in head:
            files.append(path)
        else:
            skipped += 1
    if not files:
        raise ValueError(
            f"DATA (--data) is {str(root)!r}, a folder without text files ({skipped} empty or "
            "binary files were skipped); name a folder that contains text, or one file"
        )
    return Source(root.name or "root", f"the folder {root}", tuple(files), skipped=skipped)


def unigram_entropy(counts: np.ndarray) -> float:
    """Return the entropy of token frequencies in nats.

    It is the lowest loss of a model that uses only the frequency of each token.

    Args:
        counts: Number of occurrences of each token, of any shape.
    """
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def documents(files: tuple[Path, ...], definitions: bool = False) -> Iterator[np.ndarray]:
    """Yield the tokens of each document: its bytes, then EOD; int32 [bytes + 1].

    Args:
        files: Files to read.
        definitions: If False, a document is a file. If True, each function or class at the top
            level of a file is a document, and so is the text before the first one.
    """
    for path in files:
        text = path.read_bytes()
        starts = [match.start() for match in DEFINITION.finditer(text)] if definitions else []
        edges = sorted({0, *starts, len(text)})
        for first, stop in pairwise(edges):
            tokens = np.frombuffer(text[first:stop], dtype=np.uint8)
            yield np.append(tokens.astype(np.int32), np.int32(EOD))


def import_indexed_dataset() -> ModuleType:
    """Import Megatron-Core's module without its warnings about absent Apex and TE."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def build(source: Source, prefix: Path, console: Console, definitions: bool = False) -> None:
    """Write `source.files` as PREFIX.bin and PREFIX.idx; after a failure neither file exists."""
    import torch

    indexed_dataset = import_indexed_dataset()
    partial = prefix.with_name(f"partial-{os.getpid()}-{prefix.name}")
    builder = indexed_dataset.IndexedDatasetBuilder(f"{partial}.bin", dtype=np.uint16)
    columns = (TextColumn("  tokens"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        hidden = not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            bar = progress.add_task("", total=sum(p.stat().st_size for p in source.files))
            for tokens in documents(source.files, definitions):
                builder.add_document(torch.from_numpy(tokens), [len(tokens)])
                progress.advance(bar, len(tokens) - 1)
        builder.finalize(f"{partial}.idx")
        for end in (".bin", ".idx"):
            os.replace(f"{partial}{end}", f"{prefix}{end}")
    finally:
        builder.data_file.close()
        Path(f"{partial}.bin").unlink(missing_ok=True)


def link(source: Source, prefix: Path) -> None:
    """Link PREFIX.bin and PREFIX.idx to the user's dataset, which is not changed."""
    for end in (".bin", ".idx"):
        place = Path(f"{prefix}{end}")
        place.unlink(missing_ok=True)
        place.symlink_to(f"{source.prefix}{end}")


def measure(source: Source, prefix: Path) -> Dataset:
    """Count the documents and tokens of PREFIX."""
    index = import_indexed_dataset().IndexedDataset(str(prefix)).index
    tokens = np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r")
    counts = np.zeros(EOD + 1, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 24):
        part = np.bincount(tokens[start : start + (1 << 24)])
        counts = np.pad(counts, (0, max(0, len(part) - len(counts))))
        counts[: len(part)] += part
    return Dataset(
        prefix=str(prefix),
        source=source.title,
        documents=len(index.document_indices) - 1,
        tokens=len(tokens),
        vocab_size=len(counts),
        unigram_entropy_nats=unigram_entropy(counts),
    )


def prepare(
    data: str | None,
    folder: Path,
    seq_length: int,
    console: Console,
    definitions: bool = False,
) -> Dataset:
    """Build or reuse a dataset.

    Args:
        data: Same as in `find_source`.
        folder: Folder for the dataset.
        seq_length: Tokens of one sequence.
        console: Output.
        definitions: Same as in `documents`; ignored for an existing Megatron dataset.

    Returns:
        The dataset.

    Raises:
        ValueError: There is no text, or not enough for one sequence. A sequence requires
            `seq_length` + 1 tokens, because the last token is only a label.
    """
    source = find_source(data)
    kind = "-definitions" if definitions and source.files else ""
    prefix = folder.resolve() / f"{source.name}{kind}-{source.fingerprint()}"
    summary = Path(f"{prefix}.json")
    if summary.is_file() and Path(f"{prefix}.idx").is_file():
        dataset = Dataset(**(json.loads(summary.read_text()) | {"prefix": str(prefix)}))
    else:
        console.print(f"  reading {source.title}", markup=False)
        folder.mkdir(parents=True, exist_ok=True)
        if source.files:
            build(source, prefix, console, definitions)
        else:
            link(source, prefix)
        dataset = measure(source, prefix)
        summary.write_text(json.dumps(asdict(dataset), indent=1) + "\n")
    if source.skipped:
        console.print(f"  skipped {source.skipped} empty or binary files")
    if dataset.tokens < seq_length + 1:
        raise ValueError(
            f"DATA (--data): {dataset.source} contains {dataset.tokens:,} tokens, but one "
            f"sequence of --seq-length {seq_length} requires {seq_length + 1:,}; give more text "
            "with DATA, or use a smaller --seq-length"
        )
    return dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="folder, file or .bin/.idx prefix (default: Python's own)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/data"))
    parser.add_argument("--seq-length", type=int, default=4096, help="smallest number of tokens")
    parser.add_argument(
        "--definitions", action="store_true", help="documents are functions and classes, not files"
    )
    args = parser.parse_args()
    console = Console(highlight=False)
    try:
        dataset = prepare(args.data, args.output_dir, args.seq_length, console, args.definitions)
    except ValueError as error:
        sys.exit(f"prepare_data: {error}")
    console.print(
        f"{dataset.documents:,} documents, {dataset.tokens:,} tokens, unigram entropy "
        f"{dataset.unigram_entropy_nats:.3f} nats per token\n{dataset.prefix}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
