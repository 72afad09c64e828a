"""How the S3 tier is opened: options, credentials, signatures, and errors that explain."""

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.servers import fake_s3
from tests.support.servers.fake_s3 import CLOSE, STALL, error, on, reply, running
from tierd.errors import BackendError, ConfigError
from tierd.testing.suite import get, make_chain
from tierd_backends.s3 import S3Backend, S3Options
from tierd_backends.s3.sign import EMPTY_SHA256, Credentials, Signer

LENGTH = 1000


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(403, "AccessDenied"), "permissions; they must allow s3:ListBucket"),
        (error(403, "InvalidAccessKeyId"), "does not know this access key"),
        (error(403, "SignatureDoesNotMatch"), "secret key does not belong to the access key"),
        (error(403, "RequestTimeTooSkewed"), "set this machine's clock"),
        (error(400, "ExpiredToken"), "credentials have expired"),
        (error(404, "NoSuchBucket"), "bucket does not exist: create it"),
        (
            error(301, "PermanentRedirect", x_amz_bucket_region="eu-north-1"),
            "set region to eu-north-1",
        ),
        (
            error(400, "AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"),
            "set region to eu-west-3",
        ),
        (error(307, "TemporaryRedirect"), "set endpoint or region"),
        (reply(200, b"<html>Welcome to nginx!</html>"), "does not speak S3"),
        (reply(200, b"<b>"), "does not speak S3"),
        (reply(200, b"<?xml version='1.0' encoding='odd'?><a/>"), "does not speak S3"),
        (error(403, "AccessDenied", "<Message>a\nb</Message>"), "access denied"),
        (b"220 mail.example.com ESMTP\r\n\r\n", "does not speak HTTP"),
        (error(503, "SlowDown"), "busy"),
        (error(500, "InternalError"), "refuses .HTTP 500 InternalError: why"),
    ],
)
async def test_failed_open_explains_itself(fake, answer, words):
    """The operator could not tell from the log what is wrong with the bucket."""
    fake.script = lambda request: [answer, CLOSE]
    with pytest.raises(BackendError, match=words) as caught:
        async with running(fake):
            pass
    assert str(caught.value).startswith(f"S3 bucket {fake_s3.BUCKET} at {fake.endpoint}: ")
    assert "\n" not in str(caught.value)


async def test_open_fails_without_permission_to_get(fake):
    """Credentials that may list but not read would fail each block instead of the start."""
    fake.script = on("HEAD", reply(403))
    with pytest.raises(BackendError, match=r"access denied .* they must allow s3:GetObject"):
        async with running(fake):
            pass


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:9", "cannot be reached: Connection refused"),
        ("http://nowhere.invalid", "cannot be reached: "),
    ],
)
async def test_open_of_an_unreachable_endpoint(fake, endpoint, words):
    """A wrong endpoint would cause a traceback, or hang the start."""
    with pytest.raises(BackendError, match=words):
        async with running(fake, endpoint=endpoint):
            pass


async def test_open_of_a_silent_server(fake):
    """A server that accepts connections and answers nothing would hang the start."""
    fake.script = lambda request: [STALL]
    start = time.monotonic()
    with pytest.raises(BackendError, match="no progress while receiving"):
        async with running(fake, timeout_ms=50):
            pass
    assert time.monotonic() - start < 5


async def test_open_of_a_plain_port_with_tls(fake):
    """The operator would get an obscure error for https to a server that speaks http."""
    with pytest.raises(BackendError, match=r"cannot be reached: .*SSL"):
        async with running(fake, endpoint=fake.endpoint.replace("http", "https")):
            pass


async def test_open_fails_without_credentials(fake, monkeypatch, tmp_path):
    """Without credentials requests would be sent unsigned, or the start would fail inside
    botocore."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(BackendError, match="no S3 credentials found: set access_key"):
        async with running(fake, access_key="", secret_key=""):
            pass
    with pytest.raises(BackendError, match="nobody"):
        async with running(fake, access_key="", secret_key="", profile="nobody"):
            pass
    assert not fake.requests


@pytest.mark.slow
async def test_expiring_credentials_are_renewed(fake, monkeypatch, tmp_path):
    """Temporary credentials would be used beyond their end."""
    expires = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    program = tmp_path / "credentials.py"
    program.write_text(
        "import json, pathlib\n"
        f"path = pathlib.Path({str(tmp_path / 'turn')!r})\n"
        "turn = int(path.read_text()) + 1 if path.exists() else 1\n"
        "path.write_text(str(turn))\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'KEY{turn}', 'SecretAccessKey': 's',"
        f" 'SessionToken': f'TOKEN{{turn}}', 'Expiration': {expires!r}}}))\n"
    )
    config = tmp_path / "config"
    config.write_text(f"[profile node]\ncredential_process = {sys.executable} {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    blocks = make_chain("renewed", 1, LENGTH)
    async with running(fake, access_key="", secret_key="", profile="node") as backend:
        await get(backend, blocks)
    keys = [each.headers["authorization"].split("Credential=")[1][:5] for each in fake.requests]
    tokens = [each.headers["x-amz-security-token"] for each in fake.requests]
    assert len(set(keys)) > 1
    assert [token.replace("TOKEN", "KEY") for token in tokens] == [k.rstrip("/") for k in keys]
    assert all("x-amz-security-token" in each.headers["authorization"] for each in fake.requests)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bucket": "A"}, "bucket is 'A'"),
        ({"endpoint": "localhost:9000"}, "endpoint is"),
        ({"endpoint": "http://user:pw@host"}, "put keys into access_key"),
        ({"endpoint": "http://:pw@host"}, "put keys into access_key"),
        ({"endpoint": "http://host:99999"}, "endpoint is"),
        ({"prefix": "/a"}, "prefix is"),
        ({"prefix": "a b"}, "prefix is"),
        ({"prefix": "a/../b"}, "prefix is"),
        ({"secret_key": ""}, "belong together"),
        ({"profile": "x"}, "exclude each other"),
        ({"access_key": "a\r\nb: c"}, "access_key has a character"),
        ({"region": "eu west"}, "region is"),
        ({"kms_key": "k"}, "kms_key is set but sse"),
        ({"storage_class": "GLACIER"}, "cannot be read at once"),
        ({"tls_ca": "/nowhere/ca.pem"}, "is not a file"),
        ({"connections": 0}, "connections is 0; it must be 1 to"),
        ({"timeout_ms": 10**6}, "timeout_ms is"),
    ],
)
def test_malformed_options_are_reported(fake, wrong, words):
    """A typing error would show as an error of the server, or add headers to requests."""
    with pytest.raises(ConfigError, match=words) as caught:
        S3Backend.from_options(msgspec.convert(fake.options(**wrong), S3Options))
    assert "pw" not in str(caught.value)


def test_missing_package_is_reported(fake, monkeypatch):
    """Without boto3 the daemon would end with an ImportError."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tierd\[s3\]'"):
        S3Backend.from_options(msgspec.convert(fake.options(), S3Options))


@pytest.mark.slow
def test_options_do_not_import_boto3():
    """The daemon would load boto3 only to check options."""
    code = (
        "import sys, tierd_backends.s3 as s3\n"
        "s3.S3Backend.from_options(s3.S3Options(bucket='bucket'))\n"
        "sys.exit(any(name.startswith('boto') for name in sys.modules))"
    )
    paths = "import sys; sys.path[:0] = " + repr(sys.path) + "\n"
    assert subprocess.run([sys.executable, "-c", paths + code], check=False).returncode == 0


_TEXT = st.text("abcXYZ019-_.~", min_size=1, max_size=20)


@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    path=st.lists(_TEXT, min_size=1, max_size=4),
    query=st.dictionaries(st.sampled_from(["prefix", "max-keys", "list-type"]), _TEXT),
    headers=st.dictionaries(
        st.sampled_from(["range", "if-none-match", "x-amz-storage-class"]), _TEXT
    ),
    token=st.sampled_from(["", "token=="]),
    region=st.sampled_from(["us-east-1", "eu-north-1"]),
)
def test_signature_matches_botocore(method, path, query, headers, token, region):
    """A strict server would refuse our signatures."""
    joined = "/".join(path)
    if "." in path or ".." in path:
        return
    encoded = "&".join(f"{name}={value}" for name, value in sorted(query.items()))
    signer = Signer("host:99", region)
    head = signer.head(
        method, f"/{joined}", encoded, headers, EMPTY_SHA256, Credentials("AK", "SK", token)
    ).decode()
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    ours = dict(line.split(": ", 1) for line in lines)
    url = f"http://host:99/{joined}" + (f"?{encoded}" if encoded else "")
    assert first == f"{method} {url.removeprefix('http://host:99')} HTTP/1.1"
    request = botocore.awsrequest.AWSRequest(method=method, url=url, headers=dict(headers))
    theirs = botocore.auth.S3SigV4Auth(
        botocore.credentials.Credentials("AK", "SK", token or None), "s3", region
    )
    stamp = datetime.strptime(ours["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda **_: stamp.replace(tzinfo=None))
        theirs.add_auth(request)
    assert request.headers["Authorization"] == ours["authorization"]
