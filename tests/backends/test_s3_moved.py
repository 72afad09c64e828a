"""S3: rotated keys, objects that the server does not deliver, and a moved name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.servers.fake_s3 import FakeS3, Request, error, reply, running
from tests.support.servers.proxy import Proxy
from tests.support.servers.s3 import Rclone, S3Server, SeaweedFS
from tierd.backend import HEADER_BYTES, BlockHeader, Outcome, checksum, pack_header
from tierd.core.l3.epochs import Mark, pack_mark
from tierd.errors import BackendError
from tierd.testing.suite import SelfNamingBlock, contains, get, make_chain, put
from tierd.testing.suite import running as opened
from tierd_backends.s3 import S3Backend
from tierd_backends.s3.account import RENEW_S
from tierd_backends.s3.options import S3Options

LENGTH = 4096
WAIT_S = 20.0
HIT, MISS, PRESENT, STORED = Outcome.HIT, Outcome.MISS, Outcome.PRESENT, Outcome.STORED


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[Rclone]:
    with Rclone(tmp_path / "rclone") as server:
        yield server


@contextlib.asynccontextmanager
async def tier(server: S3Server, bucket: str, **more: object) -> AsyncIterator[S3Backend]:
    """A tier on a real server's bucket."""
    options = {**server.options(bucket), "timeout_ms": 5000, **more}
    backend = S3Backend.from_options(msgspec.convert(options, S3Options))
    async with opened(backend):
        yield backend


# --- keys -------------------------------------------------------------------------------


def write_keys(path: Path, form: str, access_key: str, secret_key: str) -> None:
    """Write keys to a file, in the form of tierd or of the AWS configuration."""
    if form == "key_file":
        path.write_text(f"{access_key}\n{secret_key}\n")
    else:
        lines = ("[default]", f"aws_access_key_id={access_key}")
        path.write_text("\n".join([*lines, f"aws_secret_access_key={secret_key}", ""]))
    path.chmod(0o640)


@contextlib.asynccontextmanager
async def holding(
    fake: FakeS3, file: Path, blocks: Sequence[SelfNamingBlock]
) -> AsyncIterator[S3Backend]:
    """A tier that holds these blocks and takes its keys from a file, which has the keys FIRST."""
    write_keys(file, "key_file", "FIRST", "secret")
    async with running(fake, access_key="", secret_key="", key_file=str(file)) as backend:
        await put(backend, blocks)
        yield backend


@pytest.mark.slow
@pytest.mark.parametrize("form", ["key_file", "credentials"])
async def test_rotated_keys_are_read_again(
    rclone: Rclone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Rotated keys would need a restart of the daemon."""
    file = tmp_path / "keys"
    write_keys(file, form, rclone.access_key, rclone.secret_key)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    blocks = make_chain(f"rotated {form}", 4, LENGTH)
    keys = {"access_key": "", "secret_key": "", "key_file": str(file) if "_" in form else ""}
    async with tier(rclone, rclone.make_bucket(), **keys) as backend:
        await put(backend, blocks)
        rclone.access_key, rclone.secret_key = f"AK{form.upper()}", f"SK{form.upper()}"
        rclone.restart()
        with pytest.raises(BackendError, match="access denied"):
            await get(backend, blocks)
        write_keys(file, form, rclone.access_key, rclone.secret_key)
        async with asyncio.timeout(WAIT_S):
            outcomes: list[Outcome] = []
            while outcomes != [HIT] * 4:
                with contextlib.suppress(BackendError):
                    outcomes = await get(backend, blocks)
                await asyncio.sleep(0.05)
        denied = backend.counters["denied_total"]
        assert await contains(backend, blocks) == [True] * 4
        assert backend.counters["denied_total"] == denied


def signed_by(request: Request) -> str:
    """Return the access key that signed a request."""
    return request.headers["authorization"].split("Credential=")[1].partition("/")[0]


async def test_reload_reads_keys_again(fake: FakeS3, tmp_path: Path) -> None:
    """Keys that are about to be revoked would be used until the server denies them."""
    file = tmp_path / "keys"
    blocks = make_chain("reload", 1, LENGTH)
    async with holding(fake, file, blocks) as backend:
        file.write_text("SECOND\nsecret\ntoken-of-it\n")
        await contains(backend, blocks)
        assert signed_by(fake.requests[-1]) == "FIRST"
        await backend.reload()
        await contains(backend, blocks)
        assert signed_by(fake.requests[-1]) == "SECOND"
        assert fake.requests[-1].headers["x-amz-security-token"] == "token-of-it"
        file.write_text("THIRD\n")
        with pytest.raises(BackendError, match="does not hold an access key and a secret key"):
            await backend.reload()
        await contains(backend, blocks)
        assert signed_by(fake.requests[-1]) == "SECOND"


async def test_denials_read_keys_at_a_limited_rate(fake: FakeS3, tmp_path: Path) -> None:
    """A denied batch would read the keys, or ask the metadata service of a role, once per block."""
    file = tmp_path / "keys"
    blocks = make_chain("storm", 32, LENGTH)
    async with holding(fake, file, blocks) as backend:
        reads = 0
        account = backend._bucket._account
        read = account._read

        def counted() -> None:
            nonlocal reads
            reads += 1
            read()

        account._read = counted  # type: ignore[method-assign]
        fake.script = lambda request: (
            [error(403, "InvalidAccessKeyId")] if request.method == "GET" else None
        )
        began_s = asyncio.get_running_loop().time()
        before = fake.count("GET")
        with pytest.raises(BackendError, match="does not know this access key"):
            await get(backend, blocks)
        took_s = asyncio.get_running_loop().time() - began_s
        assert 1 <= reads <= 1 + took_s / RENEW_S
        assert fake.count("GET") == before + 32


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0o600, r"cannot be read: No such file"),
        ("AK\nSECRET\n", 0o644, "every user of this machine may use key_file .*: chmod o="),
        ("AK\n", 0o600, "does not hold an access key and a secret key"),
        ("AK\nSECRET\nTOKEN\nmore\n", 0o600, "does not hold"),
        ("AK\nS\u00e4\n", 0o600, "cannot be read: it is not a text file"),
    ],
    ids=["missing", "for everybody", "one key", "too much", "no text"],
)
async def test_malformed_key_file_is_reported(
    fake: FakeS3, tmp_path: Path, content: str | None, mode: int, words: str
) -> None:
    """The operator would only see the server's error, or other users could read the keys."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content, encoding="utf-8")
        file.chmod(mode)
    with pytest.raises(BackendError, match=words) as caught:
        async with running(fake, access_key="", secret_key="", key_file=str(file)):
            pass
    assert "SECRET" not in str(caught.value)
    assert not fake.requests


# --- objects that the server does not deliver -------------------------------------------

SSE = (
    "<Error><Code>InvalidRequest</Code><Message>The object was stored using a form of Server Side "
    "Encryption. The correct parameters must be provided to retrieve the object.</Message></Error>"
)
WITHHELD: dict[str, tuple[Callable[[bytes], bytes] | None, bytes]] = {
    "archived": (None, error(403, "InvalidObjectState")),
    "archived, and HEAD says so": (
        lambda body: reply(200, Content_Length=str(len(body)), x_amz_storage_class="GLACIER"),
        error(403, "InvalidObjectState"),
    ),
    "another's key": (lambda _: reply(400), reply(400, SSE.encode())),
    "a key that is gone": (None, error(400, "KMS.DisabledException")),
    "a part is gone": (None, error(404, "NoSuchKey")),
    "a part is gone, in other words": (None, error(404, "NoSuchPart")),
}
"""What a HEAD says, if not what is usual, and a GET."""


@pytest.mark.parametrize("how", WITHHELD)
async def test_undeliverable_object_is_a_miss(fake: FakeS3, how: str) -> None:
    """One archived object would stop all reads of the tier, and keep its block from being stored
    forever.

    Against a fake, because no server at hand archives or loses parts of an object.
    """
    head, answer = WITHHELD[how]
    blocks = make_chain(f"withheld {how}", 3, LENGTH)
    old: dict[str, bytes] = {}

    def script(request: Request) -> Iterable[bytes] | None:
        body = fake.objects.get(request.name)
        if request.name not in old or body is not old[request.name]:
            return None
        if request.method == "HEAD" and head is not None:
            return [head(body)]
        return [answer] if request.method == "GET" else None

    async with running(fake) as backend:
        await put(backend, blocks)
        name = next(each for each in fake.objects if blocks[1].key.block_hash.hex() in each)
        old[name] = fake.objects[name]
        fake.script = script
        for _ in range(4):
            assert await get(backend, blocks) == [HIT, MISS, HIT]
        assert backend.counters["denied_total"] == backend.counters["io_errors_total"] == 0
        if "part is gone" not in how or "words" in how:
            assert await contains(backend, blocks) == [True, False, True]
        before = backend.stats()
        assert await put(backend, blocks) == [PRESENT, STORED, PRESENT]
        assert fake.count("DELETE") == 0
        assert await contains(backend, blocks) == [True] * 3
        assert await get(backend, blocks) == [HIT] * 3
        assert backend.stats().blocks == before.blocks


async def test_deliverable_object_is_not_stored_over(fake: FakeS3) -> None:
    """An object that was restored from an archive, or stored again by another node, would be
    written again."""
    blocks = make_chain("restored", 1, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        fake.script = lambda request: (
            [error(403, "InvalidObjectState")] if request.method == "GET" else None
        )
        assert await get(backend, blocks) == [MISS]
        fake.script = None
        puts = fake.count("PUT")
        assert await put(backend, blocks) == [PRESENT]
        assert fake.count("PUT") == puts
        assert await get(backend, blocks) == [HIT]


@pytest.mark.slow
async def test_object_encrypted_with_a_foreign_key_is_a_miss(weed: SeaweedFS) -> None:
    """A block that another client stored with its own key (SSE-C) would stop all lookups."""
    blocks = make_chain("sse-c", 3, LENGTH)
    bucket = weed.make_bucket()
    async with tier(weed, bucket) as backend:
        await put(backend, [blocks[0], blocks[2]])
        block = blocks[1]
        name = backend._name(block.key.namespace, block.key.block_hash)
        header = BlockHeader(block.key, block.parent, LENGTH, checksum(block.payload))
        client: Any = weed.client()
        client.put_object(
            Bucket=bucket,
            Key=name,
            Body=pack_header(header) + bytes(block.payload),
            SSECustomerAlgorithm="AES256",
            SSECustomerKey="k" * 32,
        )
        assert await get(backend, blocks) == [HIT, MISS, HIT]
        assert await contains(backend, blocks) == [True, False, True]
        assert await put(backend, blocks) == [PRESENT, STORED, PRESENT]
        assert await get(backend, blocks) == [HIT] * 3
        found = client.get_object(Bucket=bucket, Key=name)["Body"].read()
        assert found[HEADER_BYTES:] == bytes(block.payload)
        client.close()


async def test_undeliverable_object_can_be_deleted(fake: FakeS3) -> None:
    """Flushed blocks would be paid for as long as the archive exists."""
    blocks = make_chain("deleted", 1, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        fake.script = lambda request: (
            [reply(400, SSE.encode() if request.method == "GET" else b"")]
            if request.method in ("GET", "HEAD") and request.name
            else None
        )
        assert await get(backend, blocks) == [MISS]
        assert await backend.delete_many(blocks[0].key.namespace, [blocks[0].key.block_hash]) == 1
        assert not fake.objects


# --- a name that leads to another server ------------------------------------------------


async def test_marks_are_read_at_the_current_address() -> None:
    """A flush that another node made at the new server would not be noticed over connections to the
    old server, which stay open."""
    first, second = (pack_mark(Mark("", epoch)) for epoch in (1, 3))
    with FakeS3() as old, FakeS3() as new:
        port = int(old.endpoint.rpartition(":")[2])
        with Proxy(("127.0.0.1", port)) as address:
            async with running(old, endpoint=f"http://127.0.0.1:{address.port}") as backend:
                await backend.add_mark(first)
                new.objects[f"tierd/marks/{second}"] = b"tierd"
                address.target = ("127.0.0.1", int(new.endpoint.rpartition(":")[2]))
                assert await backend.marks() == [second]
                await backend.add_mark(first)
                assert sorted(await backend.marks()) == sorted([first, second])
