"""Credentials, region and address of a bucket, as botocore finds them.

This is the only module that imports botocore, which takes half a second; `open` imports it. One
thread makes a session, which then only gives credentials. If the server denies a request, new
credentials may exist, so they are searched again in a new session, which has no cached ones.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import stat
import threading
import time
from urllib.parse import urlsplit

import botocore.config
import botocore.credentials
import botocore.exceptions
import botocore.session

from tierd.errors import BackendError
from tierd_backends.s3.http import Endpoint
from tierd_backends.s3.options import S3Options
from tierd_backends.s3.sign import Credentials

RENEW_S = 2.0
"""Least time between two searches for other credentials after denials: a role's credentials come
from the instance's metadata service, and a batch may be denied once per block."""

KEY_FILE_BYTES_MAX = 16 << 10
"""A longer file is not a key file; tokens have up to 4 KiB."""

_KEY_FILE = re.compile(r"\s*([!-~]+)\s+([!-~]+)(?:\s+([!-~]+))?\s*", re.ASCII)

_log = logging.getLogger("tierd_backends.s3")

DEFAULT_REGION = "us-east-1"
"""Region that a self-hosted server expects, and that AWS assumes by default."""


class Account:
    """A bucket's address, and credentials for it. `credentials` can be called on any thread."""

    def __init__(self, options: S3Options) -> None:
        """Blocks: reads files, and may ask the instance's metadata service for credentials.

        Raises BackendError.
        """
        try:
            session = botocore.session.Session(profile=options.profile or None)
            self.region = options.region or session.get_config_variable("region") or DEFAULT_REGION
            self._options = options
            self._source = _find_credentials(session, options)
            self._renewing = threading.Lock()
            self._renewed_s = -RENEW_S
            url = urlsplit(self._object_url(session, options))
            bundle = options.tls_ca or session.get_config_variable("ca_bundle") or None
            self.credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise BackendError(f"bucket {options.bucket}: {error}") from error
        assert url.hostname is not None
        https = url.scheme == "https"
        tls = _tls_context(bundle) if https else None
        self.base_path = url.path.removesuffix("k")
        self.address = Endpoint(url.hostname, url.port or (443 if https else 80), tls)
        self.host = url.netloc.removesuffix(":443" if https else ":80")

    def credentials(self) -> Credentials:
        """Return the credentials to sign with. Renews expiring ones in time, which may block.

        Raises BackendError if they cannot be renewed.
        """
        try:
            frozen = self._source.get_frozen_credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise BackendError(f"credentials cannot be renewed: {error}") from error
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    def read_again(self) -> None:
        """Read the credentials again, as after a rotation. Blocks. Raises BackendError, and keeps
        the former credentials."""
        with self._renewing:
            self._read()

    def others_than(self, denied: Credentials) -> bool:
        """Return whether credentials other than the denied ones exist by now. May block for a
        search, which is made every RENEW_S at most."""
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
            session = botocore.session.Session(profile=self._options.profile or None)
            self._source = _find_credentials(session, self._options)
        except botocore.exceptions.BotoCoreError as error:
            raise BackendError(f"credentials cannot be read again: {error}") from error

    def _object_url(self, session: botocore.session.Session, options: S3Options) -> str:
        """Return the URL of an object "k". For AWS, botocore's endpoint rules give it, in 0.3 s."""
        if options.endpoint:
            scheme, _, rest = options.endpoint.rstrip("/").partition("://")
            if options.style == "virtual":
                return f"{scheme}://{options.bucket}.{rest}/k"
            return f"{scheme}://{rest}/{options.bucket}/k"
        client = session.create_client(
            "s3",
            region_name=self.region,
            # Unused. Without them a client searches for credentials; without version 4 it does not
            # prefer the region's own endpoint.
            aws_access_key_id="unused",
            aws_secret_access_key="unused",
            config=botocore.config.Config(
                signature_version="s3v4", s3={"addressing_style": options.style}
            ),
        )
        url = client.generate_presigned_url(
            "get_object", Params={"Bucket": options.bucket, "Key": "k"}
        )
        client.close()
        assert isinstance(url, str)
        return url


def _find_credentials(
    session: botocore.session.Session, options: S3Options
) -> botocore.credentials.Credentials:
    if options.key_file:
        return botocore.credentials.Credentials(*_read_key_file(options.key_file))
    if options.access_key:
        return botocore.credentials.Credentials(options.access_key, options.secret_key)
    found = session.get_credentials()
    if found is None:
        raise BackendError(
            "no S3 credentials found: set access_key and secret_key, or key_file, or profile, or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the instance a role"
        )
    return found


def _read_key_file(path: str) -> Credentials:
    """Parse a key file. Raises BackendError, whose text shows nothing of the file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="ascii") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IRWXO:
                raise BackendError(
                    f"every user of this machine may use key_file {path}: chmod o= {path}"
                )
            match = _KEY_FILE.fullmatch(file.read(KEY_FILE_BYTES_MAX))
    except (OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is not a text file"
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
