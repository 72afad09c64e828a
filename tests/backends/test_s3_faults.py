"""The S3 tier against a scripted server: faults that real servers show only rarely."""

import asyncio
import contextlib
import hashlib
import logging
import random
import socket

import msgspec
import pytest

from tests.support.servers.fake_s3 import CLOSE, STALL, error, on, reply, running
from tierd.backend import GetRequest, Outcome, pack_header
from tierd.errors import BackendError
from tierd.testing.suite import (
    NAMESPACE,
    CanarySlots,
    contains,
    get,
    indexed,
    make_chain,
    put,
    scanned,
)
from tierd_backends.s3 import S3Backend, S3Options
from tierd_backends.s3.failure import S3Error

LENGTH = 3 * 4096 + 100
TOTAL = LENGTH + 128
HIT, MISS, CORRUPT, ERROR = Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR


def stored(fake, block):
    """Return the object of a block."""
    return next(raw for name, raw in fake.objects.items() if block.key.block_hash.hex() in name)


def head_of(length=TOTAL):
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode()


def chunked(body, size):
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x;x=y\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\nA: b\r\n\r\n"


# Malformed and incomplete replies.


@pytest.mark.parametrize("sent", [0, 1, TOTAL // 2, TOTAL - 1])
async def test_body_that_ends_early(fake, sent):
    """A body that ends early would be served in part, or cost the bucket a sound block."""
    blocks = make_chain("cut", 2, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        fake.script = on("GET", head_of() + stored(fake, blocks[0])[:sent], CLOSE)
        assert await get(backend, blocks[:1]) == [ERROR]
        fake.script = None
        assert await get(backend, blocks) == [HIT] * 2
        assert backend.counters["io_errors_total"] == 1


@pytest.mark.parametrize("sent", [0, 1, TOTAL // 2, TOTAL - 1])
async def test_body_that_stalls(fake, sent):
    """A body that stops arriving would hold the load forever."""
    blocks = make_chain("stall", 1, LENGTH)
    async with running(fake, timeout_ms=50) as backend:
        await put(backend, blocks)
        fake.script = on("GET", head_of() + stored(fake, blocks[0])[:sent], STALL)
        assert await get(backend, blocks) == [ERROR]
        assert backend.counters["timeouts_total"] == 1
        fake.script = on("GET", STALL)
        assert await get(backend, blocks) == [ERROR]
        fake.script = None
        assert await get(backend, blocks) == [HIT]


async def test_body_that_trickles(fake):
    """One byte now and then would outlast every timeout, and a cancelled call could not end."""
    blocks = make_chain("trickle", 1, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        raw = stored(fake, blocks[0])
        drips = [part for byte in raw for part in (bytes([byte]), 0.02)]
        fake.script = on("GET", head_of(), *drips)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await get(backend, blocks)
        fake.script = None
        assert await get(backend, blocks) == [HIT]


@pytest.mark.parametrize("more", [-TOTAL, -TOTAL + 127, -1, 1, 4096, 1 << 20, 1 << 40])
async def test_body_of_another_size(fake, more):
    """A body of another size would be received past the slot, or waited for to its end."""
    blocks = make_chain("size", 3, LENGTH)
    async with running(fake, connections=1) as backend:
        await put(backend, blocks)
        length = TOTAL + more
        # The body of a large one never arrives: the tier must not even wait for it.
        rest = [STALL] if length > 1 << 20 else [bytes(length)]
        script = on("GET", head_of(length), *rest)
        victim = blocks[1].key.block_hash.hex()
        fake.script = lambda request: script(request) if victim in request.name else None
        assert await get(backend, blocks) == [HIT, CORRUPT, HIT]
        assert backend.counters["corrupt_total"] == 1
        assert len(fake.objects) == 3, "another object was deleted than the one that was read"


@pytest.mark.parametrize("size", [7, 1000, TOTAL])
async def test_chunked_body(fake, size):
    """A body in chunks would be an error, or be received with the chunk sizes between its bytes."""
    blocks = make_chain("chunked", 2, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        raw = stored(fake, blocks[0])
        fake.script = on("GET", chunked(raw, size))
        assert await get(backend, [blocks[0]]) == [HIT]
        assert await get(backend, [blocks[0]]) == [HIT]
        for wrong in (raw[:-1], raw + b"x", b"", raw[:100]):
            fake.script = on("GET", chunked(wrong, size))
            assert await get(backend, [blocks[1]]) == [CORRUPT]
            fake.script = None
            await put(backend, blocks)
        fake.script = on("GET", chunked(raw, size)[: TOTAL // 2], CLOSE)
        assert await get(backend, [blocks[0]]) == [ERROR]


async def test_body_without_a_length(fake):
    """A body that ends with its connection would be served although it was cut."""
    blocks = make_chain("no length", 1, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        raw = stored(fake, blocks[0])
        head = b"HTTP/1.1 200 OK\r\n\r\n"
        fake.script = on("GET", head + raw, CLOSE)
        assert await get(backend, blocks) == [HIT]
        fake.script = on("GET", head + raw[:-1], CLOSE)
        assert await get(backend, blocks) == [ERROR]
        fake.script = on("GET", head + raw + b"x", CLOSE)
        assert await get(backend, blocks) == [CORRUPT]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 100,
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nContent-Length: 8\r\n\r\n123456789",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        b"HTTP/1.1 999 What\r\n\r\n",
    ],
)
async def test_malformed_replies(fake, garbage):
    """Malformed replies of a proxy would end a thread, or be taken as an answer about the block."""
    blocks = make_chain("garbage", 2, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        fake.script = on("GET", garbage, CLOSE)
        assert await get(backend, blocks) == [ERROR] * 2
        if b"Transfer-Encoding" not in garbage:
            fake.script = on("HEAD", garbage, CLOSE)
            with pytest.raises(BackendError):
                await contains(backend, blocks)
        fake.script = None
        assert await get(backend, blocks) == [HIT] * 2


@pytest.mark.parametrize("header", [b"Content-Length: -5", b"Transfer-Encoding: gzip"])
async def test_body_with_an_unknown_end(fake, header):
    """A body with an unknown end would be read as the reply to another request."""
    blocks = make_chain("end", 2, LENGTH)
    async with running(fake, connections=1) as backend:
        await put(backend, blocks[:1])
        head = b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n"
        fake.script = on("GET", head)
        assert await get(backend, blocks[:1]) == [ERROR]
        fake.script = None
        # The body would be read as the next reply on that connection.
        assert not any(connection.reusable for connection in backend._bucket._requests._idle)
        assert await contains(backend, blocks) == [True, False]


async def test_interim_replies(fake):
    """An unrequested 100 Continue would be taken for the answer."""
    blocks = make_chain("interim", 1, LENGTH)
    async with running(fake) as backend:
        fake.script = on("PUT", b"HTTP/1.1 100 Continue\r\n\r\n" + reply(200))
        assert await put(backend, blocks) == [Outcome.STORED]


async def test_connection_closed_between_requests(fake):
    """A server that closes idle connections would cost an error each time."""
    blocks = make_chain("closing", 4, LENGTH)
    async with running(fake) as backend:

        def script(request):
            yield fake._default(request)
            yield CLOSE

        fake.script = script
        for _ in range(5):
            await put(backend, blocks)
            assert await contains(backend, blocks) == [True] * 4
            assert await get(backend, blocks) == [HIT] * 4
        assert backend.counters["io_errors_total"] == 0


# Errors that a server reports.


async def test_storm_of_503(fake):
    """A 503 of a busy server would be remembered as "missing", or be retried without end."""
    blocks = make_chain("storm", 4, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks[:2])
        fake.script = lambda request: [error(503, "SlowDown")]
        before = fake.count()
        assert await get(backend, blocks) == [ERROR] * 4
        assert fake.count() - before == 8
        with pytest.raises(BackendError, match="busy"):
            await contains(backend, blocks)
        assert await put(backend, blocks) == [ERROR] * 4
        assert backend.counters["throttled_total"] >= 12
        fake.script = None
        assert await get(backend, blocks) == [HIT, HIT, MISS, MISS]
        assert await contains(backend, blocks) == [True, True, False, False]
        assert await put(backend, blocks[2:]) == [Outcome.STORED] * 2


async def test_single_error_is_retried(fake):
    """A single 503 or 500 would cost a recomputation although another try succeeds."""
    blocks = make_chain("hiccup", 1, LENGTH)
    async with running(fake) as backend:
        for status, code in ((503, "SlowDown"), (500, "InternalError"), (429, "")):
            answers = iter([error(status, code)])

            def script(request, answers=answers):
                return [answer] if (answer := next(answers, None)) else None

            fake.script = script
            assert Outcome.ERROR not in await put(backend, blocks)
            assert await get(backend, blocks) == [HIT]
        assert backend.counters["retries_total"] == 3


async def test_denied_requests(fake, caplog):
    """Lost permissions would look like a cold cache."""
    blocks = make_chain("denied", 3, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        fake.script = on("GET", error(403, "AccessDenied"))
        with caplog.at_level(logging.WARNING, "tierd_backends.s3"):
            for _ in range(2):
                with pytest.raises(BackendError, match=r"access denied .*: check the credentials"):
                    await get(backend, blocks)
        assert backend.counters["denied_total"] == 6
        assert caplog.text.count("access denied (HTTP 403 AccessDenied: why)") == 1
        fake.script = on("GET", reply(403))
        with pytest.raises(BackendError, match="access denied"):
            await get(backend, blocks)
        # A denial for one of several blocks affects only that block.
        hidden = blocks[1].key.block_hash.hex()
        fake.script = lambda request: (
            [error(403, "AccessDenied")]
            if request.method == "GET" and request.name.endswith(hidden)
            else None
        )
        assert await get(backend, blocks) == [HIT, ERROR, HIT]
        fake.script = on("HEAD", reply(403))
        with pytest.raises(BackendError, match="access denied"):
            await contains(backend, blocks)
        assert len(fake.objects) == 3


async def test_redirect_is_an_error(fake):
    """A redirect would be followed in circles, or be reported as a miss."""
    blocks = make_chain("moved", 1, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        before = fake.count()
        fake.script = on("GET", error(301, "PermanentRedirect", Location=fake.endpoint))
        with pytest.raises(BackendError, match="301"):
            await get(backend, blocks)
        assert fake.count() == before + 1


async def test_missing_bucket(fake):
    """A deleted bucket would look like a cold cache forever."""
    blocks = make_chain("gone", 20, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        fake.objects.clear()
        fake.script = lambda request: [
            reply(404) if request.method == "HEAD" else error(404, "NoSuchBucket")
        ]
        before = fake.count()
        with pytest.raises(BackendError, match="bucket does not exist: create it"):
            await get(backend, blocks)
        assert fake.count() <= before + 2
        with pytest.raises(BackendError, match="bucket does not exist"):
            await put(backend, blocks)


async def test_404_of_a_proxy(fake):
    """The 404 page of a proxy would be taken for the server's answer about a block."""
    blocks = make_chain("proxy", 1, LENGTH)
    async with running(fake) as backend:
        fake.script = on("GET", reply(404, b"<!doctype html><html>nothing here</html>"))
        assert await get(backend, blocks) == [ERROR]
        page = b"<Error>" + bytes(1 << 20)
        fake.script = on("GET", reply(502, page, Content_Length=str(1 << 40)), STALL)
        assert await get(backend, blocks) == [ERROR]


async def test_batch_to_a_dead_server(fake):
    """With its server down, a batch would wait for every block in turn."""
    blocks = make_chain("down", 32, LENGTH)
    async with running(fake, timeout_ms=100) as backend:
        await put(backend, blocks)
        fake.script = lambda request: [STALL]
        before = fake.count()
        assert await get(backend, blocks) == [ERROR] * 32
        assert fake.count() <= before + 4
        assert backend.counters["io_errors_total"] == 32


# Puts.


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (400, "NotImplemented"), (501, "")])
async def test_server_without_conditional_puts(fake, refusal):
    """Servers that refuse conditions, as Swift does, could not be used."""
    blocks = make_chain("conditional", 4, LENGTH)
    async with running(fake, connections=1) as backend:

        def script(request):
            return [error(*refusal)] if "if-none-match" in request.headers else None

        fake.script = script
        assert await put(backend, blocks) == [Outcome.STORED] * 4
        assert fake.count("PUT") == 5
        assert await put(backend, blocks) == [Outcome.PRESENT] * 4
        assert await get(backend, blocks) == [HIT] * 4


async def test_put_of_a_block_stored_meanwhile(fake):
    """A block that another node stored meanwhile would be stored again, or be an error."""
    blocks = make_chain("race", 2, LENGTH)
    async with running(fake) as backend:
        fake.script = on("PUT", error(412, "PreconditionFailed"))
        assert await put(backend, blocks) == [Outcome.PRESENT] * 2
        assert backend.stats().blocks == 0
        refused = set()

        def script(request):
            if request.method == "PUT" and request.name not in refused:
                refused.add(request.name)
                return [error(409, "ConditionalRequestConflict")]
            return None

        fake.script = script
        assert await put(backend, blocks) == [Outcome.STORED] * 2


async def test_headers_of_a_put(fake):
    """Most servers other than AWS would refuse the checksum trailers of newer SDKs."""
    [block] = make_chain("sent", 1, LENGTH)
    more = {"sse": "aws:kms", "kms_key": "key/1", "storage_class": "STANDARD_IA"}
    async with running(fake, **more) as backend:
        await put(backend, [block])
        sent = next(request for request in fake.requests if request.method == "PUT")
        assert sent.body == stored(fake, block)
        assert len(sent.body) == TOTAL
        assert sent.headers.pop("authorization").startswith("AWS4-HMAC-SHA256 Credential=fake/")
        assert sent.headers.pop("x-amz-date")
        assert sent.headers == {
            "host": fake.endpoint.removeprefix("http://"),
            "content-length": str(TOTAL),
            "if-none-match": "*",
            "x-amz-content-sha256": hashlib.sha256(sent.body).hexdigest(),
            "x-amz-server-side-encryption": "aws:kms",
            "x-amz-server-side-encryption-aws-kms-key-id": "key/1",
            "x-amz-storage-class": "STANDARD_IA",
        }


async def test_put_refused_before_it_is_read(fake):
    """A server that refuses a block before it has received it would stall the put."""
    blocks = make_chain("unread", 2, 16 << 20)
    async with running(fake, timeout_ms=2000) as backend:
        fake.refuse_bodies = error(403, "AccessDenied", Connection="close")
        with pytest.raises(BackendError, match="access denied"):
            await put(backend, blocks)
        fake.refuse_bodies = None
        assert await put(backend, blocks) == [Outcome.STORED] * 2
        assert fake.connections <= 4


async def test_cancelled_put_is_counted(fake):
    """A put that is cancelled while the server stores it would appear later, uncounted."""
    blocks = make_chain("abandoned", 2, LENGTH)
    async with running(fake, timeout_ms=5000) as backend:

        def script(request):
            if request.method == "PUT":
                yield 0.1
                yield fake._default(request)

        fake.script = script
        task = asyncio.create_task(put(backend, blocks))
        while fake.count("PUT") < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        assert task.cancelled()
        assert await contains(backend, blocks) == [True] * 2
        assert await get(backend, blocks) == [HIT] * 2
        assert backend.stats().blocks == 2


async def test_batch_with_a_block_twice(fake, monkeypatch):
    """A batch with a block twice, while that block is being stored, would spin and freeze the
    loop."""
    blocks = make_chain("twice", 1, LENGTH)
    async with running(fake) as backend:
        fake.script = on("PUT", 0.2)
        first = asyncio.create_task(put(backend, blocks))
        while not fake.count("PUT"):
            await asyncio.sleep(0.001)
        run, runs = backend._writers.run, []

        async def counted(work, jobs):
            runs.append(jobs)
            assert len(runs) < 100
            await run(work, jobs)

        monkeypatch.setattr(backend._writers, "run", counted)
        assert await put(backend, blocks * 2) == [Outcome.PRESENT] * 2
        assert await first == [Outcome.STORED]
        assert backend.stats().blocks == 1


async def test_put_cut_before_its_last_byte(fake):
    """A put that is cancelled just when everything is sent would be stored later, unexpectedly."""
    [block] = make_chain("last moment", 1, LENGTH)

    class CancelledTurn:
        cancelled = True

        @contextlib.contextmanager
        def using(self, sock):
            yield
            sock.shutdown(socket.SHUT_RDWR)

    async with running(fake) as backend:
        bucket = backend._bucket
        name = bucket.name(block.key)
        with pytest.raises(S3Error):
            bucket.write(
                CancelledTurn(), name, pack_header(block.header), memoryview(block.payload)
            )
    while fake.connections:
        await asyncio.sleep(0.001)
    assert fake.count("PUT") == 1
    assert not fake.objects


# Lookups, deletes, counting.


@pytest.mark.parametrize("held", [0, 1, 2, 7, 499, 500, 998, 999, 1000])
async def test_long_lookup_takes_few_requests(fake, held):
    """Looking up a long prompt would cost one request per block, each with its price."""
    blocks = make_chain("long", 1000, 1)
    async with running(fake, connections=8) as backend:
        for block in blocks[:held]:
            name = f"tierd/{NAMESPACE.hex()}/{block.key.block_hash.hex()}"
            fake.objects[name] = b""
        hashes = [block.key.block_hash for block in blocks]
        before = fake.count("HEAD")
        found = await backend.contains_many(NAMESPACE, hashes)
        assert found == [True] * held + [False] * (1000 - held)
        assert fake.count("HEAD") - before <= 4 * 8 + 1


async def test_lookup_of_a_prefix_with_a_hole(fake):
    """A block missing from the middle of a prefix would turn a lookup into an error."""
    blocks = make_chain("hole", 100, LENGTH)
    async with running(fake, connections=8) as backend:
        await put(backend, blocks)
        await backend.delete_many(NAMESPACE, [blocks[40].key.block_hash])
        held = await backend.contains_many(NAMESPACE, [b.key.block_hash for b in blocks])
        assert held == sorted(held, reverse=True)
        some = blocks[35:45]
        assert await get(backend, some) == [HIT] * 5 + [MISS] + [HIT] * 4
        assert await contains(backend, some) == [True] * 5 + [False] + [True] * 4


async def test_failed_delete_is_reported(fake):
    """A flush that the server refused would be reported as done."""
    blocks = make_chain("delete fails", 3, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        fake.script = on("DELETE", error(403, "AccessDenied"))
        hashes = [block.key.block_hash for block in blocks]
        with pytest.raises(BackendError, match="3 blocks were not deleted: access denied"):
            await backend.delete_many(NAMESPACE, hashes)
        assert backend.stats().blocks == 3
        fake.script = None
        assert await backend.delete_many(NAMESPACE, hashes) == 3
        assert backend.stats().blocks == 0


async def test_foreign_objects_are_ignored(fake):
    """Objects of other programs under the prefix would be counted, or break the scan."""
    blocks = make_chain("foreign", 3, LENGTH)
    for name in ("tierd", "tierd/", "tierd/x", f"tierd/{'0' * 32}/zz", f"tierdx/{'0' * 32}"):
        fake.objects[name] = b"not ours"
    fake.objects[f"tierd/{'0' * 48}/{'1' * 64}"] = b"ours by its name only"
    async with running(fake) as backend:
        await put(backend, blocks)
        assert backend.stats().blocks == 4
        assert sorted(await scanned(backend)) == sorted(b.header for b in blocks)


async def test_listing_of_many_pages(fake):
    """A bucket with more than one page of objects would be seen in part."""
    blocks = make_chain("pages", 2500, 10)
    async with running(fake, connections=8, timeout_ms=5000) as backend:
        await put(backend, blocks)
        assert len(await scanned(backend)) == 2500
    async with running(fake) as again:
        assert again.stats().blocks == 2500
        assert again.stats().used_bytes == 2500 * 138


async def test_listing_cut_without_a_token_is_an_error(fake):
    """A listing that the server cuts without a token would pass for a complete one: the other
    objects would be neither counted nor cleaned, and a flush's mark among them would be missed."""
    blocks = make_chain("rest", 3, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        name = min(fake.objects)
        entry = f"<Contents><Key>{name}</Key><Size>{TOTAL}</Size></Contents>"
        page = f"<ListBucketResult>{entry}<IsTruncated>true</IsTruncated></ListBucketResult>"
        fake.script = lambda request: [reply(200, page.encode())] if not request.name else None
        with pytest.raises(BackendError, match="where its listing continues"):
            await scanned(backend)
        with pytest.raises(BackendError, match="where its listing continues"):
            await backend.marks()


async def test_empty_object_does_not_end_a_scan(fake):
    """One empty object, for which servers answer no range request, would end the scan of a whole
    bucket, and its block could never be stored again."""
    blocks = make_chain("empty", 6, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
        name = next(name for name in fake.objects if blocks[2].key.block_hash.hex() in name)
        fake.objects[name] = b""

        def script(request):
            ranged = request.method == "GET" and request.name == name
            return [error(416, "InvalidRange")] if ranged and not fake.objects[name] else None

        fake.script = script
        sound = [block for block in blocks if block is not blocks[2]]
        assert sorted(await scanned(backend)) == sorted(block.header for block in sound)
        assert await put(backend, [blocks[2]]) == [Outcome.STORED]
        assert await get(backend, blocks) == [HIT] * 6


async def test_repeated_page_ends_a_listing(fake):
    """A server that returns the same page each time would be asked, and paid for, forever."""
    async with running(fake) as backend:
        again = b"<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
        page = reply(200, b"<ListBucketResult>" + again + b"</ListBucketResult>")
        fake.script = lambda request: [page]
        with pytest.raises(BackendError, match="repeats the same page"):
            async with asyncio.timeout(5):
                assert not await scanned(backend)


async def test_counting_goes_on_after_errors(fake, monkeypatch):
    """A hiccup while the bucket is counted would leave the operator without numbers."""
    monkeypatch.setattr("tierd_backends.s3.usage.INDEX_RETRY_S", 0.01)
    blocks = make_chain("counting", 2, LENGTH)
    async with running(fake) as backend:
        await put(backend, blocks)
    answers = iter([error(500, "InternalError")] * 4)

    def script(request):
        if request.query.get("max-keys") == "1000":
            return [answer] if (answer := next(answers, None)) else None
        return None

    fake.script = script
    async with running(fake) as again:
        assert again.stats().blocks == 2
    assert next(answers, None) is None


async def test_counting_while_storing(fake):
    """Blocks that are stored and dropped while a bucket is counted would be counted twice, or
    never."""
    blocks = sorted(make_chain("while storing", 2200, 10), key=lambda block: block.key)
    names = [f"tierd/{NAMESPACE.hex()}/{block.key.block_hash.hex()}" for block in blocks]
    behind, ahead = blocks[100:104], blocks[2100:2104]
    for name, block in zip(names, blocks, strict=True):
        if block not in behind[:2] + ahead[:2]:
            fake.objects[name] = bytes(138)
    may_go_on = False

    def script(request):
        if request.query.get("continuation-token", "") > names[1500]:
            while not may_go_on:
                yield 0.001

    fake.script = script
    settings = fake.options(connections=2, timeout_ms=5000)
    backend = S3Backend.from_options(msgspec.convert(settings, S3Options))
    await backend.open()
    while backend.stats().blocks < 1900:
        await asyncio.sleep(0.001)
    assert not backend.stats().index_complete
    assert await put(backend, behind[:2] + ahead[:2]) == [Outcome.STORED] * 4
    hashes = [block.key.block_hash for block in behind[2:] + ahead[2:3]]
    assert await backend.delete_many(NAMESPACE, hashes) == 3
    may_go_on = True
    await indexed(backend)
    assert backend.stats().blocks == len(fake.objects)
    assert backend.stats().used_bytes == sum(map(len, fake.objects.values()))
    await backend.close()


# Connections.


@pytest.mark.slow
async def test_failed_gets_leak_no_connections(fake):
    """Connections of failed and cancelled loads would add up until none can be opened."""
    chance = random.Random(7)
    good, bad = make_chain("good", 2, LENGTH), make_chain("bad", 4, LENGTH)
    async with running(fake) as backend:
        await put(backend, good)
        fake.script = on("GET", head_of() + bytes(5000), 0.001, bytes(TOTAL - 5000))
        slots = CanarySlots(4, 4 * 4096)
        requests = [
            GetRequest(block.key.block_hash, slots.view(slot), LENGTH)
            for slot, block in enumerate(bad)
        ]
        for turn in range(250):
            task = asyncio.create_task(backend.get_into(NAMESPACE, requests))
            if turn % 2:
                for _ in range(chance.randrange(8)):
                    await asyncio.sleep(0.0003)
                task.cancel()
            await asyncio.wait([task])
            for slot in range(4):
                slots.blank(slot)
        assert all(slots.is_blank(slot) for slot in range(4))
        assert backend.counters["corrupt_total"] >= 500
        assert backend.counters["io_errors_total"] == 0
        fake.script = None
        assert await get(backend, good) == [HIT] * 2
        assert fake.connections <= 4


async def test_concurrent_first_loads(fake):
    """Many first loads at the same time would interfere with each other's set-up."""
    blocks = make_chain("cold", 4, LENGTH)
    async with running(fake, connections=8) as backend:
        await put(backend, blocks)
    for _ in range(3):
        async with running(fake, connections=8) as backend:
            every = await asyncio.gather(*(get(backend, blocks) for _ in range(64)))
            assert every == [[HIT] * 4] * 64
            assert fake.connections <= 16


@pytest.mark.parametrize("silence", ["get", "contains", "put", "delete"])
async def test_cancel_while_the_server_is_silent(fake, silence):
    """A cancelled call would wait until the server's silence times out."""
    blocks = make_chain("silence", 8, LENGTH)
    hashes = [block.key.block_hash for block in blocks]
    async with running(fake, timeout_ms=30_000) as backend:
        await put(backend, blocks)
        fake.script = lambda request: [STALL]
        before = fake.count()
        call = {
            "get": lambda: get(backend, blocks),
            "contains": lambda: contains(backend, blocks),
            "put": lambda: put(backend, make_chain("other", 8, LENGTH)),
            "delete": lambda: backend.delete_many(NAMESPACE, hashes),
        }[silence]
        task = asyncio.create_task(call())
        while fake.count() < before + 2:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        fake.script = None
        assert await get(backend, blocks) == [HIT] * 8
