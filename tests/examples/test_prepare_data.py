"""examples/prepare_data.py: what becomes a token, what is built again, and what is refused."""

import io
import math
from pathlib import Path

import numpy as np
import prepare_data
import pytest
from rich.console import Console

pytestmark = pytest.mark.megatron


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def read(prefix):
    """The documents of a dataset as lists, by Megatron-Core's own reader."""
    dataset = prepare_data.import_indexed_dataset().IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset.document_indices) - 1)]


def test_one_document_per_file_in_order_bytes_then_eod(tmp_path, console):
    text = tmp_path / "text"
    (text / "sub").mkdir(parents=True)
    (text / "b.txt").write_bytes(b"\xff\xfeZ")  # not UTF-8: bytes are taken as they are
    (text / "a.txt").write_text("hé")
    (text / "sub" / "c.md").write_text("x")
    (text / ".hidden").write_text("never read")
    (text / "empty.txt").write_text("")
    (text / "picture.png").write_bytes(b"PNG\0\0")
    found = prepare_data.prepare(str(text), tmp_path / "out", 8, console)
    assert read(found.prefix) == [
        [104, 0xC3, 0xA9, 256],
        [0xFF, 0xFE, 90, 256],
        [120, 256],
    ]
    assert (found.documents, found.tokens, found.vocab_size) == (3, 10, 257)
    assert "skipped 2 empty or binary files" in console.file.getvalue()


def test_unigram_entropy_by_hand():
    # Shares 1/2, 1/4, 1/8, 1/8: 1/2 ln 2 + 1/4 ln 4 + 2/8 ln 8 = 7/4 ln 2; unseen tokens add 0.
    counts = np.array([4, 0, 2, 1, 1, 0])
    assert prepare_data.unigram_entropy(counts) == pytest.approx(1.75 * math.log(2), abs=1e-15)
    assert prepare_data.unigram_entropy(np.array([0, 9])) == 0.0


def test_entropy_of_a_file_counts_its_eod(tmp_path, console):
    (tmp_path / "t.txt").write_bytes(b"aab")  # tokens a a b EOD: shares 1/2, 1/4, 1/4
    found = prepare_data.prepare(str(tmp_path / "t.txt"), tmp_path / "out", 3, console)
    assert found.unigram_entropy_nats == pytest.approx(1.5 * math.log(2), abs=1e-15)


def test_unchanged_source_is_not_built_again_and_a_changed_one_is(tmp_path, console, monkeypatch):
    text = tmp_path / "t.txt"
    text.write_text("some text")
    first = prepare_data.prepare(str(text), tmp_path / "out", 4, console)
    with monkeypatch.context() as patched:
        patched.setattr(prepare_data, "build", None)  # calling it would raise
        assert prepare_data.prepare(str(text), tmp_path / "out", 4, console) == first
    text.write_text("other text, longer")
    second = prepare_data.prepare(str(text), tmp_path / "out", 4, console)
    assert second.prefix != first.prefix  # Megatron's index cache of the first cannot be met
    assert second.tokens == 19


@pytest.mark.parametrize("end", ["", ".bin", ".idx"])
def test_existing_prefix_is_used_as_it_is(tmp_path, console, end):
    builder = prepare_data.import_indexed_dataset().IndexedDatasetBuilder(
        str(tmp_path / "mine.bin"), dtype=np.int32
    )
    builder.add_document(np.array([5, 70000, 7]), [3])
    builder.add_document(np.array([1, 2]), [2])
    builder.finalize(str(tmp_path / "mine.idx"))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    found = prepare_data.prepare(f"{tmp_path}/mine{end}", tmp_path / "out", 4, console)
    assert read(found.prefix) == [[5, 70000, 7], [1, 2]]
    assert (found.documents, found.tokens, found.vocab_size) == (2, 5, 70001)
    assert Path(f"{found.prefix}.bin").is_symlink()
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert after == before


def test_default_is_the_standard_library(tmp_path):
    source = prepare_data.find_source(None)
    names = {path.name for path in source.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert list(source.files) == sorted(source.files)
    assert not any("site-packages" in path.parts for path in source.files)


def test_too_little_text_names_data_and_the_fix(tmp_path, console):
    text = tmp_path / "t.txt"
    text.write_text("a" * 63)
    assert prepare_data.prepare(str(text), tmp_path / "out", 63, console).tokens == 64
    with pytest.raises(ValueError, match=r"DATA .*contains 64 tokens.*64 requires 65.*more text"):
        prepare_data.prepare(str(text), tmp_path / "out", 64, console)


def test_data_that_cannot_serve(tmp_path):
    with pytest.raises(ValueError, match=r"DATA .*nowhere.*does not exist.*name a folder"):
        prepare_data.find_source(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"DATA .*without text files"):
        prepare_data.find_source(str(tmp_path / "empty"))
    (tmp_path / "x.bin").write_bytes(b"12")
    (tmp_path / "x.idx").write_bytes(b"not an index")
    with pytest.raises(ValueError, match=r"DATA .*x\.idx is not a Megatron index"):
        prepare_data.find_source(str(tmp_path / "x"))


def test_no_half_written_dataset_is_taken_for_a_whole_one(tmp_path, console, monkeypatch):
    text = tmp_path / "t.txt"
    text.write_text("some text")

    def broken(files, definitions):
        yield np.zeros(2, np.int32)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prepare_data, "documents", broken)
        with pytest.raises(KeyboardInterrupt):
            prepare_data.prepare(str(text), tmp_path / "out", 4, console)
    assert list((tmp_path / "out").iterdir()) == []
    assert prepare_data.prepare(str(text), tmp_path / "out", 4, console).tokens == 10


def test_definitions_are_documents_of_their_own_with_their_decorators(tmp_path):
    """By hand: what stands before the first definition, then each up to the next."""
    pieces = ["import os\n", "@cache\n@slow\ndef f():\n    def inner(): ...\n", "x = 1\n",
              "class A:\n    def g(self): ...\n", "async def h(): ..."]  # fmt: skip
    (tmp_path / "m.py").write_text("".join(pieces))
    found = prepare_data.documents((tmp_path / "m.py",), definitions=True)
    texts = [bytes(tokens[:-1].astype("uint8")).decode() for tokens in found]
    assert texts == [pieces[0], pieces[1] + pieces[2], *pieces[3:]]  # x = 1 follows f
    (whole,) = prepare_data.documents((tmp_path / "m.py",))
    assert len(whole) == len("".join(pieces)) + 1
    (tmp_path / "n.py").write_text("def f(): ...")
    assert len(list(prepare_data.documents((tmp_path / "n.py",), definitions=True))) == 1


def test_definitions_and_files_are_datasets_of_different_names(tmp_path, console):
    (tmp_path / "m.py").write_text("def f(): ...\ndef g(): ...\n")
    made = [
        prepare_data.prepare(str(tmp_path / "m.py"), tmp_path / "out", 8, console, definitions)
        for definitions in (False, True)
    ]
    assert [dataset.documents for dataset in made] == [1, 2]
    assert made[0].prefix != made[1].prefix
