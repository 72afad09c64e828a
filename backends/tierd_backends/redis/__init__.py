"""The Redis tier: a block is one value, on Redis or Valkey."""

from tierd_backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
