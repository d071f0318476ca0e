"""Asks every process of a run what it does: StatusService.GetStatus at the addresses in <folder>/services/*.json."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from slipstream import auth_credentials, rpc
from slipstream.cli.run_folder import RunFolder, read_json
from slipstream.errors import SlipstreamError
from slipstream.protos.types.v1 import status_pb2, status_pb2_grpc
from slipstream.service_command import WEIGHTS

ASK_S = 1.0  # a process that does not answer within this is shown as silent


@dataclass(frozen=True)
class ServiceStatus:
    """One process as the view and `status` show it."""

    instance: str
    service: str
    state: str  # GetStatus' word, or the supervisor's ("backing off", "finished", ...), or "silent"
    address: str = ""
    pid: int = 0
    restarts: int = 0
    waiting_for: str = ""
    waited_s: float = 0.0
    uptime_s: float = 0.0
    version: int = 0
    version_step: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class Survey:
    """Channels to the processes of a run, kept over calls. An async context manager."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._credentials = auth_credentials.of_folder(folder.path, "cli")
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Survey:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def ask_all(self) -> list[ServiceStatus]:
        """Every process that the supervisor started or that registered itself, in the supervisor's order."""
        supervised = (read_json(self._folder.state) or {}).get("processes", {})
        registered = {}
        for path in sorted(self._folder.services.glob("*.json")):
            if (entry := read_json(path)) is not None:
                registered[path.stem] = entry
        await self._forget({entry["address"] for entry in registered.values()})
        names = [*supervised, *(name for name in registered if name not in supervised)]
        return list(await asyncio.gather(*(self._one(n, supervised.get(n, {}), registered.get(n)) for n in names)))

    async def _one(self, instance: str, supervised: dict[str, Any], registered: dict[str, Any] | None) -> ServiceStatus:
        service = supervised.get("service") or (registered or {}).get("service", "")
        state = supervised.get("state", "")
        common = {"instance": instance, "service": service, "restarts": supervised.get("restarts", 0),
                  "pid": supervised.get("pid") or (registered or {}).get("pid", 0)}
        if registered is None:
            return ServiceStatus(**common, state="starting" if state == "running" and service != "redis" else state)
        try:
            answer = await self.ask(registered["address"], service)
        except SlipstreamError:
            return ServiceStatus(**common, state="silent" if state in ("running", "") else state, address=registered["address"])
        return ServiceStatus(
            **common, state=answer.state, address=registered["address"], waiting_for=answer.waiting_for,
            waited_s=rpc.seconds(answer.waited), uptime_s=rpc.seconds(answer.uptime), version=answer.policy_version.number,
            version_step=answer.policy_version.step, figures=dict(answer.figures), details=MessageToDict(answer.details))

    async def ask(self, address: str, service: str = "buffer") -> status_pb2.GetStatusResponse:
        """GetStatus of one process of a service. Raises SlipstreamError when it does not answer."""
        if address not in self._channels:
            peer = "buffer" if service == WEIGHTS else service
            self._channels[address] = rpc.channel(address, credentials=self._credentials, peer=peer)
        stub = status_pb2_grpc.StatusServiceStub(self._channels[address])
        return await rpc.call(stub.GetStatus, status_pb2.GetStatusRequest(), ASK_S)

    async def _forget(self, addresses: set[str]) -> None:
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close()
