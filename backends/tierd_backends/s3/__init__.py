"""The S3 tier: a block is one object."""

from tierd_backends.s3.backend import S3Backend
from tierd_backends.s3.options import S3Options

__all__ = ["S3Backend", "S3Options"]
