"""`slipstream ledger RUN`: where every draw and sample is, whether that adds up, and the dead letters with their reasons.

Of a live run the buffer is asked (LedgerService). Of an ended one the object store tells: ledger/balance.json, which the buffer
writes at every commit and when it drains, and ledger/*.jsonl, to which it moves its logs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from slipstream import auth_credentials, rpc
from slipstream.balance import BALANCE_KEY, complaints, counts
from slipstream.cli import run_folder
from slipstream.cli.run_folder import RunFolder
from slipstream.config import RunFile
from slipstream.errors import NotFound, SlipstreamError
from slipstream.objects import ObjectStore, open_store
from slipstream.protos.buffer.v1 import ledger_pb2, ledger_pb2_grpc

ASK_S = 5.0


@dataclass
class Account:
    """What was found. `letters` are rows of ledger/*.jsonl and of the live log, each once, oldest first."""

    balance: ledger_pb2.Balance
    live: bool
    letters: list[dict[str, Any]] = field(default_factory=list)


def ledger(run: str, dead: bool, as_json: bool) -> int:
    """Print the account; 0 when it adds up, else 1. Raises NotFound when no buffer of the run has written one yet."""
    folder, settings = run_folder.find(run)
    found = asyncio.run(read(folder, settings, dead))
    wrong = complaints(found.balance)
    if as_json:
        print(json.dumps(as_data(found, wrong, dead), indent=1))
    else:
        print("\n".join(as_text(found, wrong, dead)))
    return 1 if wrong else 0


async def read(folder: RunFolder, run: RunFile, dead: bool) -> Account:
    """The account of a run, from its buffer or, when that does not answer, from the store."""
    found = await _ask(folder, run, dead)
    options = run.objects
    async with open_store(run.objects_url, options.endpoint, options.region) as store:
        if found is None:
            found = Account(await _kept(store, run), live=False)
        if dead:
            known = {letter["id"] for letter in found.letters}
            found.letters = [*(row for row in await archived(store) if row["id"] not in known), *found.letters]
    return found


async def _ask(folder: RunFolder, run: RunFile, dead: bool) -> Account | None:
    """From the buffer; None when it does not answer."""
    if not run.service.buffer_address:
        return None
    credentials = auth_credentials.of_folder(folder.path, "cli")
    async with rpc.channel(run.service.buffer_address, credentials=credentials) as channel:
        stub: Any = ledger_pb2_grpc.LedgerServiceStub(channel)
        try:
            reply = await rpc.call(stub.GetBalance, ledger_pb2.GetBalanceRequest(), ASK_S)
            if reply.balance.run != run.run.name:  # another run's buffer has the port by now
                return None
            found = Account(reply.balance, live=True)
            if dead:
                letters = await rpc.call(stub.ListDeadLetters, ledger_pb2.ListDeadLettersRequest(), ASK_S)
                found.letters = [_row(letter) for letter in letters.letters]
        except SlipstreamError:
            return None
    return found


async def _kept(store: ObjectStore, run: RunFile) -> ledger_pb2.Balance:
    try:
        text = await store.get(BALANCE_KEY)
    except NotFound:
        raise NotFound(f"{run.run.name} has no ledger yet: its buffer does not answer and {run.objects_url}/{BALANCE_KEY} does "
                       "not exist") from None
    return json_format.Parse(text, ledger_pb2.Balance(), ignore_unknown_fields=True)


async def archived(store: ObjectStore) -> list[dict[str, Any]]:
    """Dead letters in the store, each once."""
    rows: dict[str, dict[str, Any]] = {}
    for key in await store.list("ledger/"):
        if key.endswith(".jsonl"):
            for line in (await store.get(key)).splitlines():
                row = json.loads(line)
                if row.pop("log", "") == "dead":
                    rows.setdefault(row["id"], row)
    return list(rows.values())


def _row(letter: ledger_pb2.DeadLetter) -> dict[str, Any]:
    row: dict[str, Any] = {"id": letter.id, "draw": letter.draw, "reason": letter.reason}
    if letter.HasField("index"):
        row["index"] = letter.index
    if letter.environment:
        row |= {"environment": letter.environment, "generated_tokens": letter.generated_tokens}
    if letter.ledger_epoch:
        row["epoch"] = letter.ledger_epoch
    return row


def as_data(found: Account, wrong: Sequence[str], dead: bool) -> dict[str, Any]:
    """The account for programs: the fields of slipstream.buffer.v1.Balance, and what is said about them."""
    data = json_format.MessageToDict(
        found.balance, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    plain = {name: _numbers(value) for name, value in data.items()}
    return {**plain, "source": "live" if found.live else "archive", "adds_up": not wrong, "complaints": list(wrong),
            **({"dead_letters": found.letters} if dead else {})}


def _numbers(value: Any) -> Any:
    """64-bit integers, which protobuf's JSON writes as text, as numbers."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value


def as_text(found: Account, wrong: Sequence[str], dead: bool) -> list[str]:
    """The account for people."""
    b = found.balance
    taken = time.strftime("%H:%M:%S", time.localtime(b.taken.seconds))
    place = f"asked the buffer at {taken}" if found.live else f"as the buffer left it at {taken}"
    lost = f" by this ledger, {b.lost_draws} before it began" if b.lost_draws else ""
    lines = [
        f"run         {b.run}, {place}",
        f"batches     {b.numbered_batch} handed to the trainer, {b.committed_batch} of them trained and in a checkpoint",
        f"draws       {b.draws - b.lost_draws}{lost}, each a group of {b.group_size}; all below {b.low_water_mark} are over",
        f"groups      {counts(b.groups)}",
        f"samples     {counts(b.samples)}",
        f"dropped     {counts(b.dropped)}",
        f"outstanding {_outstanding(b)}",
        f"bytes       {b.bytes} held, {b.reserved_bytes} reserved, of {b.quota_bytes}",
        f"leases      samples: {counts(b.sample_leases)}; scoring: {counts(b.scoring_leases)}; expired: {counts(b.expired)}",
        f"rejected    {_rejected(b)}",
        "adds up     " + ("yes" if not wrong else f"NO: {'; '.join(wrong)}"),
    ]
    if dead:
        lines += ["", f"{len(found.letters)} dead letters", *map(_letter, found.letters)]
    return lines


def _outstanding(b: ledger_pb2.Balance) -> str:
    if b.published_step < 0:
        return f"no version is published by this ledger yet; then at most {b.budget} groups"
    return f"{b.outstanding} groups drawn that no published version has trained, of at most {b.budget}"


# What is refused in the ordinary course of things, and why that loses nothing.
USUAL = {
    "FENCED": "of a lease that was given back, answered meanwhile, or went to another: nothing is lost by it",
    "CLOSED": "of a sample that was over: nothing is lost by it"}


def _rejected(b: ledger_pb2.Balance) -> str:
    """`3 FENCED (of a lease that was given back or went to another)`"""
    return ", ".join(
        f"{count} {reason}" + (f" ({USUAL[reason]})" if reason in USUAL else "")
        for reason, count in sorted(b.rejected.items()) if count) or "none"


def _letter(row: dict[str, Any]) -> str:
    place = f"draw {row['draw']}" + (f" sample {row['index']}" if row.get("index") is not None else "")
    more = f" ({row['environment']}, {row.get('generated_tokens', 0)} tokens)" if row.get("environment") else ""
    return f"  {place}: {row['reason']}{more}"
