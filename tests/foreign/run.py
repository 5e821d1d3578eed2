"""Megatron-LM's own unit tests as an acceptance test: `make test-megatron-lm MEGATRON=path`.

Runs files of unit tests of an unmodified checkout on gloo ranks of a CPU, in three modes: without
this package ("stock"), with it installed but not chosen ("installed"), and with BurstAttention
chosen for every configuration of more than one context-parallel rank ("burst"). Prints each file's
verdicts, then every test whose verdict differs from stock. `expected.toml` lists the expected
differences and their reasons. The exit status is 1 for any other difference, for an expected one
that is absent, and for a file of which a mode reported no test.

    python tests/foreign/run.py --megatron PATH                      # everything (hours)
    python tests/foreign/run.py --megatron PATH test_rope -k cp      # some files, some tests
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODES = ("stock", "installed", "burst")
VERDICTS = ("passed", "failed", "skipped")
UNIT_TESTS = "tests/unit_tests"
FILES = (
    "tensor_parallel/test_cross_entropy.py",
    "transformer/test_rope.py",
    "transformer/test_attention_packed_seq.py",
    "ssm/test_mamba_context_parallel.py",
    "rl/test_context_parallel.py",
    "transformer/experimental_attention_variant/test_attention_variant_dsa.py",
    "data/test_get_batch.py",
    "models/test_hybrid_model.py",
    "transformer/test_multi_token_prediction.py",
    "transformer/test_attention.py",
    "ssm/test_gated_delta_net.py",
    "transformer/test_multi_latent_attention.py",
)


class Results:
    """Verdicts and errors: mode -> file -> test -> (verdict, error)."""

    def __init__(self):
        self.found = {}

    def add(self, mode, line):
        file, _, test = line["name"].removeprefix(f"{UNIT_TESTS}/").partition("::")
        tests = self.found.setdefault(mode, {}).setdefault(file, {})
        tests[test or "(import)"] = line["verdict"], line["error"]

    def of(self, mode, file):
        return self.found.get(mode, {}).get(file, {})

    def count(self, mode, file):
        return Counter(verdict for verdict, _ in self.of(mode, file).values())

    def differences(self, mode, file):
        """test -> (stock's verdict, this mode's, error), where the two verdicts differ."""
        stock, here = self.of("stock", file), self.of(mode, file)
        none = ("absent", "")
        pairs = {test: (stock.get(test, none), here.get(test, none)) for test in {**stock, **here}}
        return {
            test: (before[0], after[0], after[1] or before[1])
            for test, (before, after) in pairs.items()
            if before[0] != after[0]
        }


class Server:
    """A process that runs files in one mode, on ranks that it forks."""

    def __init__(self, mode, options, folder):
        self.mode, self.report, self.place = mode, folder / f"{mode}.jsonl", 0
        self.log = folder / f"{mode}.log"
        self.report.touch()
        words = [mode, str(options.ranks), str(self.report), str(options.limit)]
        words += ["-k", options.k] if options.k else []
        path = [str(options.megatron), str(ROOT), os.environ.get("PYTHONPATH")]
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore",
            "TMPDIR": str(folder),  # for checkpoints of the tests
        }  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "server.py"), *words], cwd=options.megatron, stdout=log,
                stderr=log, stdin=subprocess.PIPE, text=True, env=os.environ | environment,
            )  # fmt: skip

    def run(self, file, results):
        """Run one file, and print its verdicts as they come."""
        print(f"{UNIT_TESTS}/{file}", file=self.process.stdin, flush=True)
        count, start = Counter(), time.monotonic()
        while True:
            for line in self.lines():
                if line["name"] is None:
                    seconds = time.monotonic() - start
                    print(f"{self.mode}: {file}: {totals(count)}, {seconds:.0f} s", flush=True)
                    return
                results.add(self.mode, line)
                count[line["verdict"]] += 1
                print(f"  {self.mode} {line['verdict']:7} {line['name']}", flush=True)
            if self.process.poll() is not None:
                raise RuntimeError(f"mode {self.mode} has ended:\n{self.log.read_text()[-5000:]}")
            time.sleep(0.2)

    def lines(self):
        """What the report has got since the last call."""
        text = self.report.read_text()[self.place :]
        text = text[: text.rfind("\n") + 1]
        self.place += len(text)
        return map(json.loads, text.splitlines())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def totals(count):
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS)


class Expected:
    """The differences that `expected.toml` explains: a mode, patterns of tests, verdicts."""

    def __init__(self, path=HERE / "expected.toml"):
        self.rules = tomllib.loads(path.read_text()).get("difference", [])
        self.used = set()

    def explains(self, mode, file, test, before, after):
        name, change = f"{file}::{test}", f"{before} -> {after}"
        for number, rule in enumerate(self.rules):
            fits = any(fnmatchcase(name, pattern) for pattern in rule["tests"])
            if rule["mode"] == mode and rule["change"] == change and fits:
                self.used.add(number)
                return True
        return False

    def absent(self):
        """Reasons of differences that were expected and not found."""
        return [rule for number, rule in enumerate(self.rules) if number not in self.used]


def compare(results, modes, files, expected):
    """Print the table and all differences; how many of these nobody expects."""
    print(f"\n{'file':62}" + "".join(f"{mode:>24}" for mode in modes) + "   differ (unexpected)")
    unexpected = []
    for file in files:
        cells, differing = [], []
        for mode in modes:
            count = results.count(mode, file)
            cells.append(f"{'/'.join(str(count[verdict]) for verdict in VERDICTS):>24}")
            if mode == "stock" or "stock" not in modes:
                continue
            differences = results.differences(mode, file)
            fresh = [
                (mode, file, test, *found)
                for test, found in differences.items()
                if not expected.explains(mode, file, test, *found[:2])
            ]
            unexpected += fresh
            differing.append(f"{mode} {len(differences)} ({len(fresh)})")
        print(f"{file:62}{''.join(cells)}   {', '.join(differing)}")
    print(f"Each cell: {'/'.join(VERDICTS)}.")
    if "stock" not in modes:
        print("Nothing was compared: mode stock did not run.")
    for mode, file, test, before, after, error in unexpected:
        print(f"UNEXPECTED {mode}: {file}::{test}: {before} -> {after}: {error[:300]}")
    return len(unexpected)


def without_tests(results, modes, files):
    """Print each file of which a mode reported no test; how many there are."""
    empty = [(mode, file) for file in files for mode in modes if not results.of(mode, file)]
    for mode, file in empty:
        print(f"NO TESTS {mode}: {file}")
    return len(empty)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="parts of names of files; default: all")
    parser.add_argument("--megatron", type=Path, required=True, help="a checkout of Megatron-LM")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("-k", help="pytest's -k: only these tests of each file")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=int, default=300, help="seconds of one test")
    parser.add_argument("--results", type=Path, help="write all verdicts to this JSON file")
    given = parser.parse_args()
    if not (given.megatron / UNIT_TESTS).is_dir():
        parser.error(
            f"--megatron {given.megatron}: there is no {UNIT_TESTS} in it; name the root of a "
            "checkout of github.com/NVIDIA/Megatron-LM (make test-megatron-lm MEGATRON=path)"
        )
    given.megatron = given.megatron.resolve()
    files = [f for f in FILES if not given.files or any(part in f for part in given.files)]
    if not files:
        parser.error(f"no file contains {' or '.join(given.files)}: {', '.join(FILES)}")
    return given, files


def main():
    options, files = arguments()
    results, expected, start = Results(), Expected(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megatron-lm-tests-") as folder:
        servers = [Server(mode, options, Path(folder)) for mode in options.modes]
        try:
            for file in files:
                for server in servers:
                    server.run(file, results)
                if options.results:
                    options.results.write_text(json.dumps(results.found, indent=1))
        finally:
            for server in servers:
                server.close()
    unexpected = compare(results, options.modes, files, expected)
    if not options.k:
        unexpected += without_tests(results, options.modes, files)
    print(f"{(time.monotonic() - start) / 60:.0f} minutes")
    whole = files == list(FILES) and not options.k and tuple(options.modes) == MODES
    absent = expected.absent() if whole else []
    for rule in absent:
        print(f"NOT FOUND {rule['mode']}: {rule['tests']}: {rule['change']}: {rule['reason']}")
    sys.exit(1 if unexpected or absent else 0)


if __name__ == "__main__":
    main()
