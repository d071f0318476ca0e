"""What the S3 client asks of botocore."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

import pytest
from botocore.auth import UNSIGNED_PAYLOAD

from slipstream.errors import Unavailable
from slipstream.objects import INLINE_BYTES
from slipstream.s3 import SENT_BYTES, TRIES, open_s3


@pytest.mark.parametrize(("endpoint", "hashed"), [("", False), ("https://127.0.0.1:1", False), ("http://127.0.0.1:1", True)])
async def test_a_body_is_hashed_only_where_it_could_be_changed_on_the_way(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, hashed: bool,
) -> None:
    """Over TLS a put is signed without its body; over plain HTTP, to an emulator, the body is part of the signature."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    signed: list[str] = []

    def look(request: object, **_: object) -> None:
        signed.append(request.headers["X-Amz-Content-SHA256"])  # pyright: ignore[reportAttributeAccessIssue]
        raise ConnectionAbortedError("seen")

    async with open_s3("bucket", "", endpoint, "us-east-1") as store:
        store._client.meta.events.register_last("before-send.s3", look)
        with pytest.raises(ConnectionAbortedError):
            await store._client.put_object(Bucket="bucket", Key="k", Body=b"weights")
    value = signed[0].decode() if isinstance(signed[0], bytes) else signed[0]
    assert (value != UNSIGNED_PAYLOAD) is hashed


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_large_body_is_sent_from_where_it_lies(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Every try is handed the caller's own memory, whole, a quarter of a megabyte at a time; its length is known beforehand,
    and over plain HTTP its hash."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    weights = [bytearray(os.urandom(SENT_BYTES + 1)), os.urandom(INLINE_BYTES)]
    tries: list[tuple[object, str, bytes]] = []

    def look(request: Any, **_: object) -> None:
        tries.append((request.body, request.headers["Content-Length"], request.headers["X-Amz-Content-SHA256"]))
        raise ConnectionAbortedError("seen")

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    async with open_s3("bucket", "", f"{scheme}://127.0.0.1:1", "us-east-1") as store:
        store._sleep = at_once
        store._client.meta.events.register_last("before-send.s3", look)
        with pytest.raises(Unavailable):
            await store.put("k", weights)
    assert len(tries) == TRIES
    whole = b"".join(weights)
    for body, length, signed in tries:
        sent = [piece async for piece in body]  # pyright: ignore[reportGeneralTypeIssues]
        assert b"".join(sent) == whole and int(length) == len(whole)
        assert signed.decode() == (UNSIGNED_PAYLOAD if scheme == "https" else hashlib.sha256(whole).hexdigest())
        assert [len(piece) for piece in sent[:3]] == [SENT_BYTES, 1, SENT_BYTES]
        assert {id(piece.obj) for piece in sent} == {id(part) for part in weights}
