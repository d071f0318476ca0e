"""Services that do nothing but live and die as a test says: `python -m tests.e2e.fake_services.<service>`, usual arguments.

<folder>/script.json gives each instance its lives, the last one repeated:
    {"reward-0": [{"exit": 1, "after_s": 0.1, "say": "no scorer"}, {}], "trainer-0": [{"ignore_term": true}]}
An empty life lasts until SIGTERM and exits 0. Every start, term and end is a line of <folder>/events.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def live() -> None:
    """One life of one process."""
    parser = argparse.ArgumentParser()
    for option in ("--run-file", "--instance", "--buffer", "--redis", "--port"):
        parser.add_argument(option)
    given = parser.parse_args()
    folder = Path(given.run_file).parent
    number = sum(e["instance"] == given.instance and e["event"] == "start" for e in events(folder))
    script = folder / "script.json"
    lives = json.loads(script.read_text()).get(given.instance, [{}]) if script.exists() else [{}]
    life = lives[min(number, len(lives) - 1)]

    def term(signal_number: int, frame: object) -> None:
        tell(folder, given.instance, "term")
        if not life.get("ignore_term"):
            tell(folder, given.instance, "end")
            print(json.dumps({"level": "info", "message": "stopped", "reason": "SIGTERM"}), file=sys.stderr, flush=True)
            os._exit(0)

    signal.signal(signal.SIGTERM, term)
    service = {"instance": given.instance, "service": given.instance, "pid": os.getpid(), "address": "127.0.0.1:1"}
    (folder / "services" / f"{given.instance}.json").write_text(json.dumps(service))
    tell(folder, given.instance, "start", port=given.port, redis=given.redis, buffer=given.buffer)
    if life.get("say"):
        print(json.dumps({"level": "error", "message": life["say"]}), file=sys.stderr, flush=True)
    deadline = time.monotonic() + life.get("after_s", 60.0)
    while time.monotonic() < deadline:
        signal.pause() if "after_s" not in life else time.sleep(max(0.0, deadline - time.monotonic()))
    tell(folder, given.instance, "end")
    sys.exit(life.get("exit", 1))


def tell(folder: Path, instance: str, event: str, **more: Any) -> None:
    """Append one line, atomically."""
    entry = {"instance": instance, "event": event, "pid": os.getpid(), "at": time.monotonic(), **more}
    fd = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (json.dumps(entry) + "\n").encode())
    os.close(fd)


def events(folder: Path) -> list[dict[str, Any]]:
    """What happened so far, in order."""
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
