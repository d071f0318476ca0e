"""What the S3 client asks of botocore."""

from __future__ import annotations

import pytest
from botocore.auth import UNSIGNED_PAYLOAD

from slipstream.s3 import open_s3


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
