"""Options of the S3 tier, checked before anything is opened."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tierd.errors import ConfigError
from tierd_backends.common.shared_capacity import Capacity, capacity_problems
from tierd_backends.s3.failure import ARCHIVED

CONNECTIONS_MAX = 256
"""More would only wait for this process's GIL; a typing error must not start thousands."""

TIMEOUT_MS_MAX = 60_000
"""Longer than the daemon waits for any call."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9_~.-]+(?:/[A-Za-z0-9_~.-]+)*", re.ASCII)
_PREFIX_BYTES_MAX = 512
_WORD = re.compile(r"[A-Za-z0-9_-]*", re.ASCII)
_VISIBLE = re.compile(r"[!-~]*", re.ASCII)


class S3Options(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Keys of a `[[storage]]` table of type "s3"."""

    bucket: Annotated[str, Meta(description="Name of the bucket; it must exist.")]
    endpoint: Annotated[
        str, Meta(description="URL of the S3 server, such as http://10.0.0.5:8333; empty: AWS.")
    ] = ""
    region: Annotated[
        str, Meta(description="Region; empty: the region of the AWS configuration, or us-east-1.")
    ] = ""
    prefix: Annotated[
        str, Meta(description="First part of every object's name; slashes make folders.")
    ] = "tierd"
    capacity: Capacity = 0
    style: Annotated[
        Literal["auto", "path", "virtual"],
        Meta(
            description="Where URLs name the bucket. path: in the path; virtual: in the host name; "
            "auto: virtual for AWS, path otherwise."
        ),
    ] = "auto"
    access_key: Annotated[
        str, Meta(description="Access key; empty: the AWS environment, files or role.")
    ] = ""
    secret_key: Annotated[
        str, Meta(description="Secret key that belongs to access_key; prefer key_file.")
    ] = ""
    key_file: Annotated[
        str,
        Meta(
            description="File with access key, secret key and, if used, session token, one per "
            "line; other users must not be able to read it. Read again at a reload and "
            "when the server denies the keys."
        ),
    ] = ""
    profile: Annotated[str, Meta(description="Profile of the AWS configuration to use.")] = ""
    sse: Annotated[
        Literal["none", "AES256", "aws:kms"],
        Meta(
            description="Encryption that the server is asked to apply; none: the bucket's default."
        ),
    ] = "none"
    kms_key: Annotated[
        str, Meta(description="Key for the encryption aws:kms; empty: the account's default key.")
    ] = ""
    storage_class: Annotated[
        str, Meta(description="Storage class of new objects; empty: the bucket's default.")
    ] = ""
    tls_ca: Annotated[
        str,
        Meta(
            description="PEM file of the certificate authority to trust instead of the "
            "system's authorities."
        ),
    ] = ""
    connections: Annotated[
        int, Meta(description="Number of connections for reads, and the same number for writes.")
    ] = 8
    timeout_ms: Annotated[
        int, Meta(description="Longest silence of the server before a request is cancelled.")
    ] = 1000

    def check(self) -> None:
        """Raise ConfigError with every malformed option."""
        if problems := [*self._problems()]:
            raise ConfigError(*problems)

    def _problems(self) -> Iterator[str]:
        if importlib.util.find_spec("botocore") is None:
            yield "the S3 tier needs boto3: pip install 'tierd[s3]'"
        if not _BUCKET.fullmatch(self.bucket):
            yield f"bucket is {self.bucket!r}; it must be the name of an S3 bucket"
        yield from self._problems_of_endpoint()
        if self.prefix and (
            not _PREFIX.fullmatch(self.prefix)
            or len(self.prefix) > _PREFIX_BYTES_MAX
            or {".", ".."} & set(self.prefix.split("/"))
        ):
            yield (
                f"prefix is {self.prefix!r}; it must be letters, digits, and _ ~ . - with "
                "slashes between, none at the ends"
            )
        if bool(self.access_key) != bool(self.secret_key):
            yield "access_key and secret_key belong together: set both or neither"
        given = ("access_key", "key_file", "profile")
        if len(named := [name for name in given if getattr(self, name)]) > 1:
            yield f"{' and '.join(named)} exclude each other: set one of them"
        for name in ("access_key", "secret_key", "kms_key"):
            if not _VISIBLE.fullmatch(getattr(self, name)):
                yield f"{name} has a character that no key has"
        for name in ("region", "storage_class"):
            if not _WORD.fullmatch(getattr(self, name)):
                yield f"{name} is {getattr(self, name)!r}; it must be one word"
        if self.kms_key and self.sse != "aws:kms":
            yield 'kms_key is set but sse is not "aws:kms"'
        if self.storage_class in ARCHIVED:
            yield f"storage_class is {self.storage_class}, from which blocks cannot be read at once"
        if self.tls_ca and not Path(self.tls_ca).is_file():
            yield f"tls_ca {self.tls_ca} is not a file"
        for name, most in (("connections", CONNECTIONS_MAX), ("timeout_ms", TIMEOUT_MS_MAX)):
            if not 1 <= getattr(self, name) <= most:
                yield f"{name} is {getattr(self, name)}; it must be 1 to {most}"
        yield from capacity_problems(self.capacity)

    def _problems_of_endpoint(self) -> Iterator[str]:
        if not self.endpoint:
            return
        if "@" in self.endpoint:
            # Do not show it: the part before the @ is a secret.
            yield "endpoint has an @; put keys into access_key and secret_key"
            return
        try:
            url = urlsplit(self.endpoint)
            sound = (
                url.scheme in ("http", "https")
                and bool(url.hostname)
                and url.port != 0
                and not (url.query or url.fragment)
                and _VISIBLE.fullmatch(self.endpoint) is not None
            )
        except ValueError:
            sound = False
        if not sound:
            yield f"endpoint is {self.endpoint!r}; it must be a URL such as https://host:port"

    @property
    def put_headers(self) -> dict[str, str]:
        """Headers of every put of a block."""
        headers = {
            "x-amz-server-side-encryption": "" if self.sse == "none" else self.sse,
            "x-amz-server-side-encryption-aws-kms-key-id": self.kms_key,
            "x-amz-storage-class": self.storage_class,
        }
        return {name: value for name, value in headers.items() if value}
