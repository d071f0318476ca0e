"""A ledger, or several that must stay equal, under one hand-driven clock, and what the actors remember of their leases.

`World` holds the in-memory model alone. `Pair` holds the model and two fronts of a real Redis: each call goes to one front and
to the model, and answers, contents and balance must then be equal. One front writes every body
beside its script, the other none.
"""

from __future__ import annotations

from typing import Any

from services.buffer.ledger import Lease, Rules, Version
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.memory_state import MemoryState
from services.buffer.redis_ledger import RedisLedger, connect
from slipstream.errors import SlipstreamError, Unavailable
from tests.property.ledger_sums import check_sums
from tests.property.redis_contents import comparable, contents, nonzero, plain
from tests.redis_server import RedisProcess

TASKS = {"a": 5, "b": 0, "c": 3}


class World:
    """The model; `call` checks after every operation that everything adds up."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.now = rules, 1_000_000
        self.model = MemoryLedger(rules, lambda: self.now)
        self.leases: list[Lease] = []
        self.scoring: list[Lease] = []
        self.reserved: list[tuple[int, int, int]] = []
        self.archived: list[dict[str, Any]] = []
        self.incarnations = [0]
        self.step = 0
        self.taken: set[str] = set()  # edges and drops, as es:old>new, eg:old>new and x:reason

    @property
    def state(self) -> Any:
        return self.model.state

    async def begin(self) -> None:
        """Open, take incarnation 1, publish step 0."""
        await self.call("open", TASKS)
        self.incarnations.append((await self.call("take_incarnation", 0, 0)).incarnation)
        await self.publish(1, 0)

    async def publish(self, incarnation: int, step: int) -> None:
        number = await self.call("reserve_version", incarnation, step)
        await self.call("publish_version", Version(number, step, incarnation, f"versions/{number}", number * 7))

    async def call(self, method: str, *args: Any) -> Any:
        """The answer, or (type, reason, metadata) of the error."""
        answer = await _answer(self.model, method, args)
        check_sums(self.state)
        self.taken.update(name for name, count in self.state.meta.items() if count and name.startswith(("es:", "eg:", "x:")))
        (await self.model.balance()).check(self.rules.group_size)
        return answer

    def committable(self) -> int:
        """The newest batch that a checkpoint may cover. The trainer publishes step k - 1 before it writes checkpoint k."""
        numbered = self.state.get("numbered")
        return min(numbered, self.state.get("published") + 1) if self.rules.pinned else numbered

    async def archive(self, count: int) -> None:
        """Read the logs, write the first lines elsewhere, trim those."""
        lines = await self.model.archive()
        self.archived += _without_ids(lines[:count])
        await self.model.trim(lines[:count])

    async def restart_front(self) -> None:
        """The buffer process dies; its successor joins the ledger."""
        await self.call("open", TASKS)

    async def empty(self) -> None:
        """The store loses everything."""
        self.model._state = MemoryState(self.rules, lambda: self.now)

    async def restart_redis(self) -> None:
        """Nothing to lose in the model."""
        await self.call("grace")

    async def close(self) -> None:
        """Nothing to close."""


class Pair(World):
    """The model beside two fronts of one Redis."""

    def __init__(self, server: RedisProcess, rules: Rules) -> None:
        super().__init__(rules)
        self.server = server
        self.client = connect(server.url)
        self.fronts = [self._front(0), self._front(1)]
        self.turn = 0

    def _front(self, number: int) -> RedisLedger:
        front = RedisLedger(self.client, self.rules, lambda: self.now)
        front.beside_bytes = 1 << 30 if number else 1
        if not number:
            front.groups_at_once = 1
        return front

    async def begin(self) -> None:
        await self.client.flushall()
        for front in self.fronts:
            await front.open(TASKS)
        await super().begin()

    async def call(self, method: str, *args: Any) -> Any:
        """Both, the real one through the next front."""
        self.turn += 1
        front = self.fronts[self.turn % 2]
        if front._scripts.lost_connection and method not in ("open", "grace"):
            await self.model.grace()  # as the front does by itself
        if method == "number_batch" and self.turn % 3 == 0:
            await self._begin_to_number(*args)
        expected = await super().call(method, *args)
        found = await _answer(front, method, args)
        assert found == expected, f"{method}{args}: model {expected}, Redis {found}"
        real, model = await contents(self.client, front), comparable(dict(self.state.contents()))
        assert plain(real) == plain(model), f"after {method}{args}"
        balance, of_model = await front.balance(), await self.model.balance()
        balance.check(self.rules.group_size)
        for part in ("meta", "samples", "groups", "dropped"):
            assert nonzero(getattr(balance, part)) == nonzero(getattr(of_model, part)), part
        return expected

    async def _begin_to_number(self, incarnation: int, batch: int) -> None:
        """One call of however many it takes a front that knows nothing."""
        front = self._front(0)
        run = front._run

        async def dies(name: str, *arguments: Any, **named: Any) -> Any:
            answer = await run(name, *arguments, **named)
            if "look" in answer[0]:
                raise Unavailable("dead", "REDIS")
            return answer

        front._run = dies
        await _answer(front, "number_batch", (incarnation, batch))

    async def archive(self, count: int) -> None:
        front = self.fronts[self.turn % 2]
        await self.call("archive")
        lines = await front.archive()
        await super().archive(count)
        await front.trim(lines[:count])
        await front.trim(lines[:count])  # a repeat trims nothing that came since
        await self.call("archive")

    async def restart_front(self) -> None:
        number = (self.turn + 1) % 2
        self.fronts[number] = self._front(number)
        await super().restart_front()

    async def empty(self) -> None:
        await self.client.flushall()
        await super().empty()

    async def restart_redis(self) -> None:
        """SIGKILL and start on the append-only file; the fronts notice by a failed call."""
        self.server.kill()
        for front in self.fronts:
            assert await _answer(front, "sweep", ()) == (Unavailable, "REDIS", {})
        self.server.start()
        await super().restart_redis()

    async def close(self) -> None:
        await self.client.aclose()


async def _answer(ledger: Any, method: str, args: Any) -> Any:
    try:
        return _without_ids(await getattr(ledger, method)(*args))
    except SlipstreamError as error:
        return type(error), error.reason, dict(error.metadata)


def _without_ids(answer: Any) -> Any:
    """Lines of a log are equal although each ledger numbers them in its own way."""
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        return [{k: v for k, v in line.items() if k != "id"} for line in answer]
    return answer
