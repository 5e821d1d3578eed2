"""What ranks report of the tests that they run, and whether they hang."""

import json
import time

PATIENCE = 30  # seconds that a rank may take longer for a test than one that failed in it


class Watch:
    """What the ranks of one round have written so far."""

    def __init__(self, folder, world, round_):
        self.paths = [folder / f"{round_}-{rank}.jsonl" for rank in range(world)]
        self.ended = [{} for _ in self.paths]  # by rank: name -> line
        self.started = [None] * world
        self.places, self.reported = [0] * world, set()
        self.last = time.time()

    def read(self):
        for rank, path in enumerate(self.paths):
            if not path.exists():
                continue
            text = path.read_text()
            for line in text[self.places[rank] :].splitlines():
                line, self.last = json.loads(line), time.time()
                if line["event"] == "start":
                    self.started[rank] = line["name"], line["time"]
                else:
                    self.ended[rank][line["name"]] = line
            self.places[rank] = len(text)

    def complete(self):
        """Lines of REPORT for tests that all ranks have ended, once each."""
        for name in list(self.ended[0]):
            lines = [ended.get(name) for ended in self.ended]
            if name not in self.reported and all(lines):
                self.reported.add(name)
                yield summary(name, lines)

    def stuck(self, limit):
        """(line of REPORT) of the test in which ranks wait in vain, or None."""
        names = [started[0] for started in self.started if started]
        for name in dict.fromkeys(names):
            lines = [ended.get(name) for ended in self.ended]
            if name in self.reported or all(lines):
                continue
            failed = [line for line in lines if line and line["verdict"] == "failed"]
            waited = time.time() - self.last
            if (failed and waited > PATIENCE) or waited > limit:
                return summary(name, [line or waiting(limit, failed) for line in lines])
        return None

    def in_progress(self):
        return next((s[0] for s in self.started if s and s[0] not in self.reported), None)


def waiting(limit, failed):
    error = "" if failed else f"no end after {limit} s"
    return {"verdict": "failed", "error": error}


def summary(name, lines):
    verdicts = [line["verdict"] for line in lines]
    verdict = next((v for v in ("failed", "passed") if v in verdicts), "skipped")
    error = next((line["error"] for line in lines if line["error"]), "")
    return {"name": name, "verdict": verdict, "ranks": verdicts, "error": error}
