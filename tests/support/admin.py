"""A daemon's admin port and its metrics."""

from __future__ import annotations

import http.client
import re

from tests.support.daemon_process import DaemonProcess
from tests.support.prometheus import Family, read

WAIT_S = 20.0


ADMIN = '\n[admin]\nlisten = "127.0.0.1:0"\n'


def port_of(daemon: DaemonProcess) -> int:
    found = re.findall(r"metrics and health on http://127\.0\.0\.1:(\d+)", daemon.log.read_text())
    return int(found[-1])


def fetch(port: int, path: str, method: str = "GET") -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response, body


def metrics(port: int) -> dict[str, Family]:
    response, body = fetch(port, "/metrics")
    assert response.status == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return read(body)
