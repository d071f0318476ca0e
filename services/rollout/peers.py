"""The other workers of a run, and which of them is to have a range: who owns it, who may have it, how long to wait for them.

consumes      addresses of workers, from a list or from DNS, looked up again every LOOKUP_S; their answers
produces      bytes of ranges, unchecked
waits for     a peer's next piece, SILENCE_S at most, and all of an answer, DEADLINE_S and its transfer; the first look-up
unblocked by  the piece; the end of that time

Every worker ranks the members for a range by a hash of (member, range), so all agree without talking, and a member that comes
or goes moves only the ranges that are its own: https://en.wikipedia.org/wiki/Rendezvous_hashing. The first of the ranking owns
the range: it alone reads it, for all. The second keeps it, too.

A peer that reads says so every BEAT_S, so a dead or frozen one is told from a slow store within SILENCE_S. Who fails rests.
What peers cost a worker beyond what the store takes is counted: LOST_MOST_S of its readers a minute, then none is asked until
that is made up for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from services.rollout.weight_client import STORE_BYTES_S, Rest, received
from slipstream import logs, rpc
from slipstream.auth_credentials import Credentials
from slipstream.errors import ConfigError, Exhausted, NotFound, SlipstreamError, Unavailable
from slipstream.lifecycle import Clock
from slipstream.range_calls import reading, request_of
from slipstream.ranges import Range
from slipstream.tensors import READERS

LOOKUP_S = 5.0
FIRST_LOOKUP_S = 2.0  # a version waits no longer than this for the first addresses
BEAT_S, SILENCE_S = 0.25, 1.0
DEADLINE_S = 5.0  # and a second for each STORE_BYTES_S
ASKED = 2  # owners that are asked for a range before what lies behind them
LOST_MOST_S, LOST_OVER_S = 5.0 * READERS, 60.0  # of readers that lose time beside each other: 5 s of a version
QUICK_S, QUICK_BYTES_S = 0.05, 64 << 20  # what a store is expected to take, until it shows otherwise
REST_LONG_S = 60.0  # who lied, works for another run or knows nothing of ranges is left alone this long
RANKED_MOST = 1 << 14  # rankings that are remembered

log = logs.get("rollout")


class Pace:
    """How long the store takes, and how much longer peers took. Seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slowness = 1.0  # of the store, over what it is expected to take: a mean over its last reads
        self._lost = 0.0
        self._at = clock.monotonic()

    @property
    def patient(self) -> bool:
        """Whether peers may be asked."""
        now = self._clock.monotonic()
        self._lost = max(0.0, self._lost - (now - self._at) * LOST_MOST_S / LOST_OVER_S)
        self._at = now
        return self._lost < LOST_MOST_S

    def store_took(self, size: int, seconds: float) -> None:
        """A read of the store."""
        self._slowness += (seconds / _expected_s(size) - self._slowness) / 4

    def peer_took(self, size: int, seconds: float, useful: bool) -> None:
        """An answer of a peer. All is lost of one that brought nothing, unless it was quick; of another, the time beyond twice
        the store's."""
        fair_s = 2 * max(1.0, self._slowness) * _expected_s(size) if useful else QUICK_S
        self._lost += max(0.0, seconds - fair_s)


class Peer:
    """One other worker."""

    def __init__(self, address: str, credentials: Credentials, clock: Clock) -> None:
        """Raises ConfigError for plaintext to an address that is not loopback."""
        self.address = address
        self._channel = rpc.channel(address, credentials=credentials, peer="rollout", connect_s=SILENCE_S)
        self._read = reading(self._channel)
        self.rest = Rest(clock)
        self._calls, self._retired = 0, False

    async def read(self, wanted: Range, run: str, held: bool) -> bytes | None:
        """The bytes, unchecked; None when the peer does not have them, and is none the worse for it. Raises SlipstreamError."""
        if self._retired:
            raise Unavailable(f"worker {self.address} has left", "LEFT")
        self._calls += 1
        try:
            return await self._answer(wanted, run, held)
        finally:
            self._calls -= 1
            if self._retired and not self._calls:
                await self.close()

    async def _answer(self, wanted: Range, run: str, held: bool) -> bytes | None:
        try:
            async with asyncio.timeout(DEADLINE_S + (wanted.size or 0) / STORE_BYTES_S):
                data = await received(
                    self._read(request_of(wanted, run, held)), wanted, SILENCE_S, SILENCE_S, f"worker {self.address}")
        except TimeoutError:
            self.rest.begin()
            raise Unavailable(f"worker {self.address}: not done in time", "DEADLINE") from None
        except NotFound as error:
            if error.reason == "RUN":
                self.rest.begin(REST_LONG_S)
            return None
        except SlipstreamError as error:
            if not isinstance(error, Exhausted):  # who has much to do has not failed
                self.rest.begin(None if isinstance(error, Unavailable) else REST_LONG_S)
            raise
        self.rest.end()
        return data

    async def retire(self) -> None:
        """Close after the last call: closing a channel would cancel whoever waits for an answer."""
        self._retired = True
        if not self._calls:
            await self.close()

    async def close(self) -> None:
        await self._channel.close()


@dataclass(frozen=True, slots=True)
class Member:
    """One worker's address; `here`: on this machine, so by its port it may be this process."""

    address: str
    here: bool


class Peers:
    """Workers by their addresses. `own`: this worker's host:port, "" as long as it serves nothing."""

    def __init__(
        self, named: Sequence[str], run: str, own: Callable[[], str], credentials: Credentials, clock: Clock,
    ) -> None:
        """Raises ConfigError for a name off this machine without certificates."""
        for entry in named:
            if not credentials.secure and not rpc.is_loopback(entry):
                raise ConfigError(
                    f"objects.near.peers: {entry} is not loopback and would be plaintext: set security.tls_dir (--tls-dir)")
        self._named, self._run, self._own = tuple(named), run, own
        self._credentials, self._clock = credentials, clock
        self._members: tuple[Member, ...] = ()
        self._peers: dict[str, Peer] = {}
        self._ranked: dict[str, tuple[Member, ...]] = {}
        self._looked, self._told = asyncio.Event(), ""
        self.pace = Pace(clock)

    @property
    def members(self) -> tuple[str, ...]:
        """Addresses, this worker's included."""
        return tuple(m.address for m in self._members)

    async def watch(self) -> None:
        """Look addresses up, for ever."""
        while True:
            await self.look_up()
            await self._clock.sleep(LOOKUP_S)

    async def look_up(self) -> None:
        """Once. What cannot be looked up leaves the former addresses."""
        try:
            found = [pair for entry in self._named for pair in await _addresses(entry)]
        except OSError as error:
            if self._told != str(error):
                self._told = str(error)
                log.warning(f"objects.near.peers: {error}; the former addresses stay", names=list(self._named))
            return
        finally:
            self._looked.set()
        self._told = ""
        members = tuple(sorted({Member(a, _is_here(a)) for a in found}, key=lambda m: m.address))
        if members != self._members:
            gone = set(self._peers) - {m.address for m in members}
            self._members = members
            self._ranked.clear()
            await asyncio.gather(*(self._peers.pop(address).retire() for address in gone))

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    async def ready(self) -> None:
        """Until addresses were looked up once; FIRST_LOOKUP_S at most, and once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOKUP_S):
                await self._looked.wait()
        self._looked.set()

    def owns(self, name: str) -> bool:
        """Whether this worker is the one to read a range, as far as it knows."""
        return next((self._is_self(m) for m in self._alive(name)), True)

    def keeps(self, name: str) -> bool:
        """Whether others will look for a range here: it is among the first ASKED of the ranking."""
        return any(self._is_self(m) for m in self._ranking(name)[:ASKED])

    def asked(self, name: str) -> list[Peer]:
        """Whom to ask for a range, in order: at most ASKED that do not rest, and nobody behind this worker itself."""
        found: list[Peer] = []
        for member in self._alive(name):
            if len(found) == ASKED or self._is_self(member):
                break
            found.append(self._peer(member.address))
        return found

    def spare(self, name: str) -> Peer | None:
        """Who had a range before this worker came to own it, or restarted."""
        return next((self._peer(m.address) for m in self._alive(name) if not self._is_self(m)), None)

    async def read(self, peer: Peer, wanted: Range, held: bool = False) -> bytes | None:
        """Ask one. Its time is counted, see `Pace`. Raises SlipstreamError."""
        started, useful = self._clock.monotonic(), False
        try:
            data = await peer.read(wanted, self._run, held)
            useful = data is not None
            return data
        finally:
            self.pace.peer_took(wanted.size or 0, self._clock.monotonic() - started, useful)

    def order(self, names: Sequence[str]) -> list[int]:
        """In which order to read ranges: the own ones first, because others wait for them; the rest in an order of this
        worker's own, so that not all ask the same owner at once."""
        own = self._own()
        return sorted(range(len(names)), key=lambda i: (not self.owns(names[i]), _score(own, names[i])))

    def _alive(self, name: str) -> list[Member]:
        return [
            m for m in self._ranking(name)
            if (peer := self._peers.get(m.address)) is None or peer.rest.over or self._is_self(m)]

    def _ranking(self, name: str) -> tuple[Member, ...]:
        ranked = self._ranked.get(name)
        if ranked is None:
            if len(self._ranked) >= RANKED_MOST:
                self._ranked.clear()
            ranked = tuple(sorted(self._members, key=lambda m: _score(m.address, name)))
            self._ranked[name] = ranked
        return ranked

    def _peer(self, address: str) -> Peer:
        if (peer := self._peers.get(address)) is None:
            peer = self._peers[address] = Peer(address, self._credentials, self._clock)
        return peer

    def _is_self(self, member: Member) -> bool:
        return member.here and member.address.rpartition(":")[2] == self._own().rpartition(":")[2]


async def beating(task: asyncio.Task[object]) -> AsyncGenerator[None, None]:
    """Until a task is done, once every BEAT_S; leaves it alone when it is closed."""
    while not (await asyncio.wait({task}, timeout=BEAT_S))[0]:
        yield


def _expected_s(size: int) -> float:
    return QUICK_S + size / QUICK_BYTES_S


def _score(member: str, name: str) -> bytes:
    return hashlib.blake2b(f"{member}\n{name}".encode(), digest_size=8).digest()


async def _addresses(entry: str) -> list[str]:
    """Every address behind host:port. Raises OSError."""
    host, _, port = entry.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return [f"[{place[0]}]:{port}" if family == socket.AF_INET6 else f"{place[0]}:{port}" for family, _, _, _, place in found]


def _is_here(address: str) -> bool:
    """Whether an address is this machine's: the kernel would reach it from itself. Nothing is sent."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError:  # no way leads there
            return False
        return probe.getsockname()[0] == host
