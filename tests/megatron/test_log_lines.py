"""The log as a run prints it."""

from megatron_burst.megatron import patching


def test_a_long_line_of_the_log_is_a_table():
    short = "burst attention: algorithm burst | side kv"
    assert patching.folded(short) == [short]
    long = f"{short} | {'kernel ' * 12}| {'store ' * 30}| layout zigzag"
    first, kernel, store, more, layout = patching.folded(long)
    assert first == short
    assert kernel.strip() == ("kernel " * 12).strip()
    assert f"{store} {more.strip()}".strip() == ("store " * 30).strip()
    assert layout == "    layout zigzag"
    assert max(map(len, (first, kernel, store, more, layout))) <= 120
