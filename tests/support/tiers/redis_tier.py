"""A Redis tier on a real server, for tests."""

from __future__ import annotations

import contextlib

import msgspec

from tierd.testing import suite
from tierd_backends.redis import RedisBackend
from tierd_backends.redis.options import RedisOptions


def made(options, **more):
    return RedisBackend.from_options(msgspec.convert({**options, **more}, RedisOptions))


@contextlib.asynccontextmanager
async def running(options, **more):
    async with suite.running(made(options, **more)) as backend:
        yield backend
