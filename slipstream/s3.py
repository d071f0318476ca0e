"""Objects in S3 or a store that speaks its protocol, through aiobotocore. Imported only for s3:// URLs.

Conditions are S3's own: If-None-Match for `put_if_absent`, If-Match for `replace`; the tag is the ETag. Retries are ours, not
botocore's, because a repeated conditional write has to know that it is a repeat: a 412 after a lost reply may be the echo of
our own success, so the object is read back and compared.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session
from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError, PartialCredentialsError
from botocore.exceptions import ConnectionError as NoConnection

from slipstream.errors import ConfigError, Conflict, NotFound, OutOfRange, SlipstreamError, Unavailable
from slipstream.objects import INLINE_BYTES, Data, Piece, check_key, check_prefix, check_range, pieces, probe_conditions

T = TypeVar("T")

PART_BYTES = 16 << 20  # larger objects go up in parts of this size
PARTS_AT_ONCE = 4
SENT_BYTES = 256 << 10  # handed to the connection at a time
TRIES = 6
_BACKOFF_S, _BACKOFF_MOST_S = 0.05, 2.0
_ABSENT = {"IfNoneMatch": "*"}


@contextlib.asynccontextmanager
async def open_s3(bucket: str, prefix: str, endpoint: str, region: str) -> AsyncIterator[S3Store]:
    """A store of the objects under s3://bucket/prefix. Credentials come from botocore's usual places."""
    config = AioConfig(
        # botocore's default CRC32 costs upload speed and is refused by some stores; manifests carry their own checksums.
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
        retries={"total_max_attempts": 1}, http_session_cls=_OneTry,
        connect_timeout=10, read_timeout=60, max_pool_connections=32,
        # Hashing a body for its signature takes as long as sending it: over TLS nobody can change it on the way.
        s3={"payload_signing_enabled": endpoint.startswith("http:"), **({"addressing_style": "path"} if endpoint else {})})
    session = get_session()
    async with session.create_client("s3", region_name=region, endpoint_url=endpoint or None, config=config) as client:
        yield S3Store(client, bucket, prefix)


class _OneTry(AIOHTTPSession):
    """HTTP sessions that send a request once.

    aiohttp sends GET, PUT and DELETE a second time, silently, when the connection breaks before the reply. The repetition of a
    conditional write that took effect is answered 412, and nothing would tell it from somebody else's win. There is no public
    switch (aio-libs/aiohttp#10790).
    """

    async def _get_session(self, proxy_url: Any) -> aiohttp.ClientSession:
        session = await super()._get_session(proxy_url)
        if not hasattr(session, "_retry_connection"):
            raise ConfigError(
                f"aiohttp {aiohttp.__version__} may repeat writes to S3 and has no known switch for it: install 3.11 to 3.14")
        session._retry_connection = False
        return session


class _Body:
    """Buffers as one body, sent piece by piece and joined nowhere: each is encrypted and sent while the cache still holds it.

    Given bytes, botocore makes a file of them, which aiohttp copies out in pieces again. To botocore this is a file, too, which
    it reads where the body is part of the signature; to aiohttp an asynchronous iterable, begun anew by each request.
    """

    def __init__(self, parts: Sequence[Piece]) -> None:
        self._parts, self._size = parts, sum(map(len, parts))
        self._unread = self._pieces()

    def __len__(self) -> int:
        return self._size

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in self._pieces():
            yield piece

    def read(self, size: int = -1) -> Piece:
        """The next piece, whatever `size`; b"" at the end."""
        return next(self._unread, b"")

    def tell(self) -> int:
        return 0

    def seek(self, offset: int, whence: int = 0) -> None:
        """Read from the start again: nobody asks for another place."""
        self._unread = self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        for part in self._parts:
            view = memoryview(part)
            yield from (view[start : start + SENT_BYTES] for start in range(0, len(view), SENT_BYTES))


class _Refused(Exception):
    """A condition did not hold (HTTP 412). `repeat`: an earlier try of the same write had no clear answer."""

    def __init__(self, repeat: bool) -> None:
        super().__init__()
        self.repeat = repeat


class S3Store:
    """See ObjectStore. `put` of a large object is a multipart upload; nothing is visible before it completes."""

    def __init__(
        self, client: Any, bucket: str, prefix: str = "", jitter: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client, self._bucket, self._prefix = client, bucket, f"{prefix}/" if prefix else ""
        self._jitter, self._sleep = jitter, sleep
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")

    async def put(self, key: str, data: Data, durable: bool = True) -> None:
        await self._put(key, pieces(data), {})

    async def put_if_absent(self, key: str, data: Data) -> bool:
        parts = pieces(data)
        try:
            await self._put(key, parts, _ABSENT)
        except _Refused as refused:
            return refused.repeat and await self._is(key, parts) is not None
        return True

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        check_range(key, offset, size)
        if size == 0:
            await self._call(key, lambda: self._client.head_object(**self._at(key)))
            return b""
        asked: dict[str, str] = {}
        if offset or size is not None:
            asked["Range"] = f"bytes={offset}-{'' if size is None else offset + size - 1}"
        data, _ = await self._call(key, lambda: self._read(key, asked))
        if size is not None and len(data) != size:
            raise OutOfRange(f"object {key} ends at byte {offset + len(data)}, before {offset + size}", "OBJECT_RANGE", key=key)
        return data

    async def get_tagged(self, key: str) -> tuple[bytes, str]:
        return await self._call(key, lambda: self._read(key, {}))

    async def replace(self, key: str, data: Data, tag: str | None) -> str:
        parts = pieces(data)
        try:
            return await self._put(key, parts, _ABSENT if tag is None else {"IfMatch": tag})
        except NotFound:  # If-Match on a key that is gone
            found = ""
        except _Refused as refused:
            found = await self._is(key, parts) if refused.repeat else None
            if found:
                return found
        raise Conflict(f"object {key} was changed by somebody else", "OBJECT_TAG", key=key, expected=tag)

    async def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        keys: list[str] = []
        asked: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = await self._call(prefix, lambda: self._client.list_objects_v2(**asked))
            keys += [item["Key"][len(self._prefix) :] for item in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return sorted(keys)
            asked["ContinuationToken"] = page["NextContinuationToken"]

    async def delete(self, key: str) -> None:
        await self._call(key, lambda: self._client.delete_object(**self._at(key)))

    async def probe(self) -> None:
        await probe_conditions(self)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    async def _read(self, key: str, asked: dict[str, str]) -> tuple[bytes, str]:
        reply = await self._client.get_object(**self._at(key), **asked)
        async with reply["Body"] as body:
            return await body.read(), reply["ETag"]  # a body that breaks off raises

    async def _put(self, key: str, parts: list[Piece], condition: dict[str, str]) -> str:
        """Write under a condition. Returns the new tag. Raises _Refused when the condition does not hold."""
        if sum(map(len, parts)) > PART_BYTES:
            return await self._put_parts(key, parts, condition)
        body = _Body(parts)
        if len(body) <= INLINE_BYTES:  # pointers and manifests: the store itself notices when they are damaged on the way
            digest = hashlib.md5(b"".join(parts), usedforsecurity=False).digest()
            condition = {**condition, "ContentMD5": base64.b64encode(digest).decode()}
        reply = await self._call(key, lambda: self._client.put_object(**self._at(key), Body=body, **condition))
        return reply["ETag"]

    async def _put_parts(self, key: str, parts: list[Piece], condition: dict[str, str]) -> str:
        upload = await self._call(key, lambda: self._client.create_multipart_upload(**self._at(key)))
        at = {**self._at(key), "UploadId": upload["UploadId"]}
        slots = asyncio.Semaphore(PARTS_AT_ONCE)

        async def send(number: int, chunk: list[Piece]) -> dict[str, Any]:
            async with slots:
                body = _Body(chunk)
                reply = await self._call(key, lambda: self._client.upload_part(**at, PartNumber=number, Body=body))
                return {"PartNumber": number, "ETag": reply["ETag"]}

        try:
            async with asyncio.TaskGroup() as group:
                sent = [group.create_task(send(n, chunk)) for n, chunk in enumerate(_chunks(parts), 1)]
            listed = {"Parts": [task.result() for task in sent]}
            return await self._complete(key, at, listed, condition, parts)
        except BaseException as error:
            await self._abort_upload(key, at)
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None
            raise

    async def _complete(
        self, key: str, at: dict[str, str], listed: dict[str, Any], condition: dict[str, str], parts: list[Piece],
    ) -> str:
        """The upload becomes the object. When it is gone, an earlier try may have completed it: then these bytes are there."""
        try:
            reply = await self._call(
                key, lambda: self._client.complete_multipart_upload(**at, MultipartUpload=listed, **condition))
            return reply["ETag"]
        except NotFound:
            if (tag := await self._is(key, parts)) is not None:
                return tag
            if "IfMatch" in condition:
                raise  # the object that was to be replaced is gone
            raise Unavailable(f"{self.url}/{key}: the upload vanished before it was complete", "NO_UPLOAD", key=key) from None

    async def _abort_upload(self, key: str, at: dict[str, str]) -> None:
        """Free the parts. A failure leaves them to the bucket's lifecycle rule for incomplete uploads."""
        with contextlib.suppress(SlipstreamError):
            await self._call(key, lambda: self._client.abort_multipart_upload(**at))

    async def _is(self, key: str, parts: Sequence[Piece]) -> str | None:
        """The tag of the object when it holds exactly these bytes."""
        try:
            data, tag = await self.get_tagged(key)
        except NotFound:
            return None
        return tag if data == b"".join(parts) else None

    async def _call(self, key: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """One request, tried up to TRIES times while the store is unavailable. Raises SlipstreamError or _Refused."""
        unclear, last = False, Unavailable(f"{self.url}/{key}")
        for number in range(TRIES):
            if number:
                await self._sleep(min(_BACKOFF_S * 2**number, _BACKOFF_MOST_S) * self._jitter())
            try:
                return await attempt()
            except ClientError as error:
                code, http = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
                if http == 412:
                    raise _Refused(unclear) from None
                if (sorted_error := self._sorted(key, code, http, error)) is not None:
                    raise sorted_error from None
                # 409: a conditional write of the same key is in progress. S3 says: try again.
                last = Unavailable(f"{self.url}/{key}: {code} ({http}) {error}", code or "S3", key=key)
            except (NoCredentialsError, PartialCredentialsError) as error:
                raise ConfigError(
                    f"{self.url}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role") from None
            except (NoConnection, HTTPClientError, aiohttp.ClientError, OSError, TimeoutError) as error:
                last = Unavailable(f"{self.url}/{key}: {type(error).__name__}: {error}", "S3_CONNECTION", key=key)
            unclear = True
        raise last

    def _sorted(self, key: str, code: str, http: int, error: ClientError) -> SlipstreamError | None:
        """The error that a reply stands for; None when trying again may help."""
        if code == "NoSuchBucket":
            return ConfigError(f"bucket {self._bucket} does not exist: create it or change objects.url")
        if http == 404:
            return NotFound(f"object {key} does not exist in {self.url}", "OBJECT", key=key)
        if http == 416:
            return OutOfRange(f"object {key} has no such byte range", "OBJECT_RANGE", key=key)
        if http in (401, 403):
            return Unavailable(f"{self.url} refuses access ({code}): check credentials and the bucket's policy", "S3_ACCESS")
        if http >= 500 or http in (408, 409, 429) or code in ("RequestTimeout", "SlowDown", "BadDigest"):
            return None
        return SlipstreamError(f"{self.url}/{key}: {error}", code or "S3", key=key)


def _chunks(parts: Sequence[Piece]) -> list[list[Piece]]:
    """Buffers cut and grouped into parts of PART_BYTES, without copying."""
    chunks: list[list[Piece]] = [[]]
    room = PART_BYTES
    for piece in parts:
        view = memoryview(piece)
        while len(view):
            if not room:
                chunks.append([])
                room = PART_BYTES
            chunks[-1].append(view[:room])
            taken = len(chunks[-1][-1])
            view, room = view[taken:], room - taken
    return chunks
