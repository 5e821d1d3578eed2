"""Errors of several ranks: one report if all raise the same error, otherwise one per rank."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from megatron_burst.cli import ranks


@pytest.fixture
def launched(monkeypatch):
    """Set the variables of a launcher without a store of its own, such as srun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def reported(*errors):
    """Return for each rank whether it leaves its error to rank 0."""
    with ThreadPoolExecutor(len(errors)) as pool:
        said = [f"megatron-burst pretrain: error: {error}" for error in errors]
        return list(pool.map(ranks._shared, range(len(errors)), [len(errors)] * len(errors), said))


def test_the_same_error_is_printed_once(launched, capsys):
    assert reported("no such flag", "no such flag", "no such flag") == [True] * 3
    error = capsys.readouterr().err
    assert error == "megatron-burst pretrain: error (all ranks): no such flag\n"


def test_other_errors_are_printed_by_each_rank(launched, capsys):
    assert reported("no such flag", "no such file") == [False] * 2
    assert capsys.readouterr().err == ""


def test_a_rank_that_fails_alone_prints_its_own(launched, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "PATIENCE", timedelta(seconds=0.3))
    monkeypatch.setattr(ranks, "MOMENT", timedelta(seconds=0.1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks.report("megatron-burst pretrain", ValueError("no room"))
    assert capsys.readouterr().err == "megatron-burst pretrain: error: no room\n"


def test_without_a_meeting_place_nothing_is_lost(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    ranks.report("megatron-burst doctor", ValueError("no room"))
    assert capsys.readouterr().err == "megatron-burst doctor: error: no room\n"
