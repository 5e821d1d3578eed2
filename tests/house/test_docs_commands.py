"""What `make test-docs` reads from docs/quickstart.md; running it takes minutes."""

import docs_commands


def test_the_commands_of_the_page_and_the_losses_they_print_are_found():
    page = docs_commands.PAGE.read_text()
    settings, runs = docs_commands.commands(page)
    assert settings.count("COMMON=") == 1
    for ranks, run in zip((1, 2, 4), runs, strict=True):
        assert f"--nproc-per-node {ranks} " in run
    assert all("pretrain --cpu pretrain_gpt.py $COMMON" in run for run in runs)
    columns = docs_commands.losses(page)
    assert [len(column) for column in columns] == [10] * len(runs)


def test_without_a_checkout_it_says_that_it_was_skipped(capsys, tmp_path):
    assert docs_commands.main([]) == 0
    assert "SKIPPED" in capsys.readouterr().out
    assert docs_commands.main(["--megatron", str(tmp_path)]) == 2
    assert "has no pretrain_gpt.py" in capsys.readouterr().err


def test_a_run_that_fails_or_prints_other_losses_is_told(tmp_path):
    line = "echo ' iteration 1/ 1 | lm loss: 4.000000E+00 |'"
    assert docs_commands.wrong(line, "", ["4.000000"], tmp_path, tmp_path) is None
    assert "losses 4.0" in docs_commands.wrong(line, "", ["4.001000"], tmp_path, tmp_path)
    assert "losses 4.0" in docs_commands.wrong(line, "", ["4.000000"] * 2, tmp_path, tmp_path)
    failed = docs_commands.wrong("echo why >&2; exit 3", "", [], tmp_path, tmp_path)
    assert failed == "exit status 3\nwhy\n"
