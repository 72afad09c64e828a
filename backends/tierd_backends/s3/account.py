"""What botocore knows for the S3 tier: credentials, region, and where a bucket is.

The only module that imports botocore, which takes half a second; `open` imports it. A session is
made by one thread, and asked only for credentials after that. A server that denies may know other
keys by now, so credentials are looked for anew then, in a session that remembers nothing.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import stat
import threading
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import botocore.config
import botocore.credentials
import botocore.exceptions
import botocore.session

from tierd.errors import BackendError
from tierd_backends.s3.http import Endpoint
from tierd_backends.s3.sign import Credentials

RENEW_S = 2.0
"""Least time between two looks for other credentials after denials: a role's come from a service
of the instance's, and a batch may be denied once a block."""

KEY_FILE_BYTES_MAX = 16 << 10
"""A file of keys that is longer is some other file; tokens have up to 4 KiB."""

_KEY_FILE = re.compile(r"\s*([!-~]+)\s+([!-~]+)(?:\s+([!-~]+))?\s*", re.ASCII)

_log = logging.getLogger("tierd_backends.s3")

DEFAULT_REGION = "us-east-1"
"""What a server of one's own expects, and where AWS looks if it is not told."""


class Wishes(NamedTuple):
    """The options that decide where a bucket is and who asks; empty means botocore's choice."""

    bucket: str
    endpoint: str
    region: str
    style: str
    access_key: str
    secret_key: str
    key_file: str
    profile: str
    tls_ca: str


class Account:
    """Where a bucket is, and credentials for it. `credentials` may be called by any thread."""

    def __init__(self, wishes: Wishes) -> None:
        """Blocks: reads files, and may ask the instance's metadata service for credentials.

        Raises BackendError.
        """
        try:
            session = botocore.session.Session(profile=wishes.profile or None)
            self.region = wishes.region or session.get_config_variable("region") or DEFAULT_REGION
            self._wishes = wishes
            self._source = _find_credentials(session, wishes)
            self._renewing = threading.Lock()
            self._renewed_s = -RENEW_S
            url = urlsplit(self._object_url(session, wishes))
            bundle = wishes.tls_ca or session.get_config_variable("ca_bundle") or None
            self.credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise BackendError(f"bucket {wishes.bucket}: {error}") from error
        assert url.hostname is not None
        https = url.scheme == "https"
        tls = _tls_context(bundle) if https else None
        self.base_path = url.path.removesuffix("k")
        self.address = Endpoint(url.hostname, url.port or (443 if https else 80), tls)
        self.host = url.netloc.removesuffix(":443" if https else ":80")

    def credentials(self) -> Credentials:
        """What to sign with now; those that expire are renewed in good time, which may block.

        Raises BackendError if they cannot be renewed.
        """
        try:
            frozen = self._source.get_frozen_credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise BackendError(f"credentials cannot be renewed: {error}") from error
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    def read_anew(self) -> None:
        """Look for credentials anew, as after a rotation. Blocks. Raises BackendError, and keeps
        those that there were."""
        with self._renewing:
            self._read()

    def others_than(self, denied: Credentials) -> bool:
        """Whether there are other credentials by now than those that were denied. Blocks while
        they are looked for, which is done every RENEW_S at most."""
        with self._renewing:
            try:
                if self.credentials() != denied:
                    return True
                if time.monotonic() - self._renewed_s < RENEW_S:
                    return False
                self._read()
                return self.credentials() != denied
            except BackendError as error:
                _log.warning("%s", error)
                return False

    def _read(self) -> None:
        self._renewed_s = time.monotonic()
        try:
            session = botocore.session.Session(profile=self._wishes.profile or None)
            self._source = _find_credentials(session, self._wishes)
        except botocore.exceptions.BotoCoreError as error:
            raise BackendError(f"credentials cannot be read anew: {error}") from error

    def _object_url(self, session: botocore.session.Session, wishes: Wishes) -> str:
        """URL of the object "k". For AWS, botocore's endpoint rules know it; they take 0.3 s."""
        if wishes.endpoint:
            scheme, _, rest = wishes.endpoint.rstrip("/").partition("://")
            if wishes.style == "virtual":
                return f"{scheme}://{wishes.bucket}.{rest}/k"
            return f"{scheme}://{rest}/{wishes.bucket}/k"
        client = session.create_client(
            "s3",
            region_name=self.region,
            # Unused, but a client looks for credentials if it is given none, and prefers the
            # region's own endpoint only if it signs by version 4.
            aws_access_key_id="unused",
            aws_secret_access_key="unused",
            config=botocore.config.Config(
                signature_version="s3v4", s3={"addressing_style": wishes.style}
            ),
        )
        url = client.generate_presigned_url(
            "get_object", Params={"Bucket": wishes.bucket, "Key": "k"}
        )
        client.close()
        assert isinstance(url, str)
        return url


def _find_credentials(
    session: botocore.session.Session, wishes: Wishes
) -> botocore.credentials.Credentials:
    if wishes.key_file:
        return botocore.credentials.Credentials(*_read_key_file(wishes.key_file))
    if wishes.access_key:
        return botocore.credentials.Credentials(wishes.access_key, wishes.secret_key)
    found = session.get_credentials()
    if found is None:
        raise BackendError(
            "no S3 credentials found: set access_key and secret_key, or key_file, or profile, or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the instance a role"
        )
    return found


def _read_key_file(path: str) -> Credentials:
    """What a file of keys holds. Raises BackendError, which shows nothing of it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="ascii") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IRWXO:
                raise BackendError(
                    f"every user of this machine may use key_file {path}: chmod o= {path}"
                )
            match = _KEY_FILE.fullmatch(file.read(KEY_FILE_BYTES_MAX))
    except (OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BackendError(f"key_file {path} cannot be read: {told}") from error
    if match is None:
        raise BackendError(
            f"key_file {path} does not hold an access key and a secret key, each on a line"
        )
    return Credentials(match[1], match[2], match[3] or "")


def _tls_context(bundle: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=bundle)
    except OSError as error:
        raise BackendError(f"tls_ca {bundle} cannot be read: {error}") from error
