"""Kills, stops and cuts everything of a real run for some minutes, then proves that nothing was lost and nothing trained twice.

    python -m benchmarks.chaos --minutes 10 --seed 1 [--schedule pinned|free] [--json FILE]

The run is a real one: supervisor, embedded Redis, buffer, reward workers (pinned two, free one), two rollout workers and
trainer, durability `always`, on a model of twenty thousand parameters, so that a step takes milliseconds and a restart most
of the time. From the seed:

    SIGKILL     of trainer, rollout, reward, buffer, supervisor (which is started again: `slipstream run` resumes) and Redis
    SIGSTOP     of the same, and SIGCONT after a while that is sometimes longer than a lease
    links       between workers and buffer and between buffer and Redis: resets, lost replies, delays (faults/proxy.py)

Afterwards the run is left in peace until it finishes, and judged (faults/auditor.py) by what the trainer wrote beside each step
and what the workers were told, never by the ledger. The weights are judged, too: pinned, every version equals that of a second,
undisturbed run; free-running, every version is reproduced by `slipstream replay` from the batch log.

Exit code 0 only if nothing is lost, repeated or left over, the weights are equal, and the run was really disturbed: in ten
minutes at least 15 kills and 15 stops of each kind of process, 15 resets, 15 lost replies and 15 delays, 60 batches, and three
passages over every edge of the state machines that faults can reach (faults/edges.py names the others). In less time,
proportionally less.

`--plant repeat | loss` plants a fault in a service (faults/plants.py): the exit code must not be 0.

`--previous REV` is a rolling upgrade (faults/releases.py): every service starts on that revision, `last` for the last release,
and while the faults go on one after the other is asked to stop and starts again from the working tree. Every mixture has to
train. Weights are not compared: two releases may round differently.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults import remains
from benchmarks.faults.auditor import Judgement, different_weights, judge
from benchmarks.faults.divert import Site
from benchmarks.faults.edges import counted, exempt
from benchmarks.faults.injector import STALL_S, Injector, Stalled
from benchmarks.faults.plants import PLANTS
from benchmarks.faults.proxy import Http2Answers, Proxy, any_bytes
from benchmarks.faults.releases import LAST, ORDERS, NoRelease, Upgrade, former
from benchmarks.faults.schedule import KILLS, LINK_FAULTS, LINKS, PROCESSES, ROUNDS_PER_MINUTE, link_faults, process_faults
from benchmarks.faults.victims import ROOT, Run
from benchmarks.record import publish
from slipstream.config import RunFile, parse

BATCHES, PASSAGES, FULL_MINUTES = 60, 3, 10.0
STEPS_PER_MINUTE = 120  # a disturbed run, which is paced, stays below
PACE_S = 0.8
NOTHING_TO_UPGRADE_FROM = 3  # exit code
LEASE_S = 2.0
FIRST_STEP_S = 120.0
PINNED = {"max_lag": 1, "max_attempts": 1000}  # a sample that is given up would change the batch
FREE = {"max_lag": 2, "max_attempts": 3, "group_timeout_s": 2.5 * LEASE_S}


def run_file(site: Path, name: str, arguments: argparse.Namespace, disturbed: Path) -> dict[str, Any]:
    """The run: everything small, everything often."""
    pinned = arguments.schedule == "pinned"
    return {
        "run": {"name": "chaos", "folder": str(site / name), "seed": arguments.seed, "steps": arguments.steps},
        "model": {"build": {
            "model_type": "qwen3_moe", "tokenizer_chars": "0123456789=", "config": {
                "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 32,
                "initializer_range": 0.05, "tie_word_embeddings": False}}},
        "environments": [{
            "name": "sort-digits", "entry": "benchmarks.faults.paced:PacedSort",
            "scorer": "benchmarks.faults.paced:slow_even_share",
            "args": {"pace_file": str(disturbed), "pace_s": PACE_S}}],
        "schedule": {"mode": arguments.schedule, "groups_per_batch": 4, "group_size": 4, **(PINNED if pinned else FREE)},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 8},
        "rollout": {
            "workers": arguments.workers, "slots": 6, "context": 16, "max_new_tokens": 6, "lease_s": LEASE_S,
            "heartbeat_s": LEASE_S / 4},
        # What is not leased stays unscored, where faults reach it: a group's deadline while all reward workers stand still.
        "reward": {"workers": 2 if pinned else 1, "lease_s": LEASE_S, "batch": 4},
        "buffer": {"durability": "always"},
        "service": {"audit": True, "stall_s": 60},
    }


@dataclass
class Outcome:
    """Everything that is known at the end of a chaos run."""

    judgement: Judgement
    left: remains.Remains
    complaints: list[str]
    weights: str  # "equal (pinned)"
    edges: dict[tuple[str, str, str], int]
    upgrade: Upgrade | None = None


@contextlib.asynccontextmanager
async def proxies(site: Site) -> AsyncIterator[dict[str, Proxy]]:
    """Listening proxies by name; `faults.json` tells the services where."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as sockets:  # the path of a unix socket has to be short
        found = {name: Proxy(name, partial(site.address_behind, name), (lambda: any_bytes) if name == "redis" else Http2Answers)
                 for name in LINKS}
        addresses = {name: await proxy.listen(Path(sockets) / "redis.sock" if name == "redis" else None)
                     for name, proxy in found.items()}
        site.write_plan(addresses, "")
        try:
            yield found
        finally:
            for proxy in found.values():
                await proxy.close()


async def chaos(arguments: argparse.Namespace, site: Site, say: Any) -> tuple[Outcome, Injector]:
    """Disturb a run, let it finish, judge it."""
    disturbed = site.folder / "disturbed"
    settings = run_file(site.folder, "run", arguments, disturbed)
    path = site.run_file
    path.write_text(json.dumps(settings))
    complaints: list[str] = []
    upgrade: Upgrade | None = None
    async with proxies(site) as links:
        site.write_plan(json.loads(site.plan.read_text())["proxies"], arguments.plant)
        run = Run(site, path)
        injector = Injector(run, links, arguments.seed, say)
        if arguments.previous:
            upgrade = Upgrade(site, run, arguments.previous, ORDERS[arguments.order], arguments.minutes * 60, say)
            upgrade.begin()
        disturbed.touch()
        await run.start(fresh=True)
        try:
            await first_step(run)
            say(f"the run trains; faults for {arguments.minutes:g} minutes")
            await injector.disturb(
                arguments.minutes * 60, process_faults(arguments.seed, LEASE_S, arguments.rounds),
                link_faults(arguments.seed), upgrade.roll if upgrade else None)
            disturbed.unlink()
            say("left in peace until it finishes")
            if code := await injector.rest():
                complaints.append(f"the run ended with {code}: {run.last_words}")
        except Stalled:
            complaints.append(f"nothing was trained for {STALL_S:g} s although nothing was disturbed: see {site.folder}")
        finally:
            disturbed.unlink(missing_ok=True)
            await run.end()
    outcome = await judged(parse(settings), site, complaints)
    outcome.upgrade = upgrade
    if upgrade:
        outcome.complaints += upgrade.complaints()
    elif complaints or not outcome.judgement.clean:
        say("there is nothing to compare the weights with")
    elif arguments.schedule == "pinned":
        await undisturbed(arguments, site, disturbed, outcome, say)
    else:
        await replayed(site, outcome, say)
    return outcome, injector


async def first_step(run: Run) -> None:
    """Faults begin once the run works at all."""
    deadline = time.monotonic() + FIRST_STEP_S
    while not run.trained:
        if run.code is not None or time.monotonic() > deadline:
            raise SystemExit(f"chaos: the run did not start: {run.last_words or run.output}")
        await asyncio.sleep(0.1)


async def judged(settings: RunFile, site: Site, complaints: list[str]) -> Outcome:
    """What the evidence says, and what the run left behind."""
    folder = Run(site, Path()).folder
    left = await remains.look(settings, folder)
    judgement = judge(site.run, left.dead, left.open_draws)
    if left.adds_up:
        complaints.append(left.adds_up)
    if left.epoch != 1:
        complaints.append(f"the ledger is in epoch {left.epoch}: it was lost and rebuilt, although every write was durable")
    if left.bytes or left.open_leases or left.open_draws:
        complaints.append(f"left over: {left.bytes} bytes, {left.open_leases} leases, {len(left.open_draws)} draws")
    return Outcome(judgement, left, complaints, "not compared", counted(left.counters))


async def undisturbed(
    arguments: argparse.Namespace, site: Site, disturbed: Path, outcome: Outcome, say: Any,
) -> None:
    """The same run once more, in peace; the versions of both must be equal."""
    say("the same run once more, undisturbed")
    settings = run_file(site.folder, "peace", arguments, disturbed)
    path = site.folder / "peace.json"
    path.write_text(json.dumps(settings))
    code, words = await command("slipstream.cli", "run", str(path), "--plain", "--fresh")
    if code:
        outcome.complaints.append(f"the undisturbed run ended with {code}: {words}")
    differences = different_weights(site.run, site.folder / "peace")
    outcome.complaints += differences[:5]
    outcome.weights = f"{'different' if differences or code else 'equal'} (pinned)"


async def replayed(site: Site, outcome: Outcome, say: Any) -> None:
    """Retrain from the batch log; every published version must come out again."""
    say("replaying the batch log")
    code, words = await command("services.trainer.replay", "--folder", str(site.run))
    say(words)
    if code:
        outcome.complaints.append(f"replay ended with {code}: {words}")
    outcome.weights = f"{'different' if code else 'equal'} (replay)"


async def command(module: str, *arguments: str) -> tuple[int, str]:
    """Run `python -m module` to its end: exit code and last line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    said, _ = await process.communicate()
    lines = said.decode(errors="replace").strip().splitlines()
    return process.returncode or 0, lines[-1] if lines else ""


def too_little(arguments: argparse.Namespace, outcome: Outcome, injector: Injector) -> list[str]:
    """What a run of these minutes should have been put through, and was not."""
    share = min(1.0, arguments.minutes / FULL_MINUTES)
    kills, batches, passages = int(KILLS * share), math.ceil(BATCHES * share), int(PASSAGES * share)
    hits = {f"{action}s of {process}": injector.counts[action, process] for action in ("kill", "stop") for process in PROCESSES}
    hits |= {what: sum(injector.counts[action, link] for link in LINKS) for action, what in LINK_FAULTS.items()}
    missing = [f"only {count} {what}, {kills} are needed" for what, count in hits.items() if count < kills]
    if outcome.judgement.batches < batches:
        missing.append(f"only {outcome.judgement.batches} batches, {batches} are needed")
    free = exempt(arguments.schedule == "pinned")
    return missing + [
        f"the {machine} edge {old} -> {new} was taken {count} times, {passages} are needed"
        for (machine, old, new), count in outcome.edges.items() if count < passages and (machine, old, new) not in free]


def report(arguments: argparse.Namespace, outcome: Outcome, injector: Injector, seconds: float) -> int:
    """Table, complaints, the last line; the exit code."""
    judgement, left, counts = outcome.judgement, outcome.left, injector.counts
    complaints = judgement.complaints + outcome.complaints + too_little(arguments, outcome, injector)
    if outcome.upgrade:
        publish("mixtures", [*ORDERS["buffer-first"], "steps"], outcome.upgrade.table(), {}, "")
    actions = ("kill", "stop", *LINK_FAULTS)
    rows = [[name, *(str(counts[action, name]) for action in actions)] for name in PROCESSES]
    free = exempt(arguments.schedule == "pinned")
    for (machine, old, new), count in outcome.edges.items():
        reason = free.get((machine, old, new), "")
        print(f"{machine:7} {old:>9} -> {new:9} {count:6}  {reason and 'exempt: ' + reason}".rstrip())
    figures = {
        "schedule": arguments.schedule, "minutes": arguments.minutes, "seed": arguments.seed, "seconds": seconds,
        "kills": injector.kills(), **{f"kills_{p}": injector.kills(p) for p in PROCESSES},
        "stops": sum(counts["stop", p] for p in PROCESSES),
        **{what.replace(" ", "_"): sum(counts[action, link] for link in LINKS) for action, what in LINK_FAULTS.items()},
        "batches": judgement.batches, "incarnations": judgement.incarnations, "resumed_steps": judgement.resumed,
        "samples_acknowledged": judgement.acknowledged, "samples_trained": judgement.trained,
        "samples_dropped_by_name": judgement.dropped, "lost": judgement.lost, "repeated": judgement.repeated,
        "weights": outcome.weights, "bytes": left.bytes, "open_leases": left.open_leases,
        "least_edge_passages": min((n for edge, n in outcome.edges.items() if edge not in free), default=0),
        "complaints": len(complaints)}
    publish("faults", ["process or link", *actions], rows, figures, arguments.json)
    for complaint in complaints[:20]:
        print(f"chaos: {complaint}", file=sys.stderr)
    if len(complaints) > 20:
        print(f"chaos: and {len(complaints) - 20} more", file=sys.stderr)
    sys.stderr.flush()
    print(f"kills {injector.kills()}, lost {judgement.lost}, repeated {judgement.repeated}, weights {outcome.weights}, "
          f"bytes {left.bytes}, open leases {left.open_leases}", flush=True)
    return 1 if complaints else 0


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedule", choices=["pinned", "free"], default="pinned")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; default: more than fit into the minutes")
    parser.add_argument("--rounds", type=float, default=ROUNDS_PER_MINUTE, help="of faults, a minute; see faults/schedule.py")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument("--plant", choices=PLANTS, default="", help="plant a fault, to see the audit fail")
    parser.add_argument("--previous", default="", help=f"upgrade from this revision during the run; {LAST} = the last release")
    parser.add_argument("--order", choices=ORDERS, default="buffer-first", help="of the upgrade")
    parser.add_argument("--folder", default="", help="evidence is left there; default runs/chaos-<schedule>-<seed>")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    try:
        arguments.previous = arguments.previous and former("" if arguments.previous == LAST else arguments.previous)
    except NoRelease as error:
        print(f"chaos: {error}", file=sys.stderr)
        return NOTHING_TO_UPGRADE_FROM
    arguments.steps = arguments.steps or max(40, round(STEPS_PER_MINUTE * arguments.minutes))
    site = Site(Path(arguments.folder or f"runs/chaos-{arguments.schedule}-{arguments.seed}").resolve())
    if site.folder.exists():
        if not site.plan.exists():
            raise SystemExit(f"chaos: {site.folder} exists and is not of a chaos run: choose another --folder")
        shutil.rmtree(site.folder)
    site.folder.mkdir(parents=True)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the run is ended, too
    outcome, injector = asyncio.run(chaos(arguments, site, say))
    return report(arguments, outcome, injector, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
