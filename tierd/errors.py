"""Exceptions, one class for each party at fault.

A bug in tierd is a failed assert, a peer's fault a `RemoteProtocolError`, a fault of the outside
world a `BackendError`, the operator's fault a `ConfigError`. A miss is a value, never an
exception.
"""


class TierdError(Exception):
    """Base of every error that tierd raises on purpose."""


class ConfigError(TierdError):
    """The operator's input is wrong; each message names the key and the remedy."""

    def __init__(self, *problems: str) -> None:
        """`problems` are all problems found; the error's text joins them with semicolons."""
        super().__init__("; ".join(problems))
        self.problems = problems


class NamespaceError(ConfigError):
    """A namespace lacks a field, has an unknown field, or a field of a wrong type."""


class RemoteProtocolError(TierdError):
    """The peer broke the protocol; only its session ends."""


class RefusedError(TierdError):
    """The daemon understood the call and refuses it; the session goes on."""


class DisconnectedError(TierdError):
    """There is no session with a daemon; every call answers a miss."""


class BackendError(TierdError):
    """A call failed for the whole storage tier, not for single blocks."""


class HashInputError(TierdError, TypeError):
    """A value that canonical CBOR would silently hash as something else."""
