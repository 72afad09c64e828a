"""Whose fault it is: the first question about any failure.

Ours is an assert, the peer's a `RemoteProtocolError`, the world's a
`BackendError`, the operator's a `ConfigError`. A miss is a value, never an
exception.
"""


class TierdError(Exception):
    """Base of every error that tierd raises on purpose."""


class ConfigError(TierdError):
    """The operator's input is wrong; each message names the key and the remedy."""

    def __init__(self, *problems: str) -> None:
        """Every problem that was found; with several, the text has them one after another."""
        super().__init__("; ".join(problems))
        self.problems = problems


class NamespaceError(ConfigError):
    """A namespace lacks a field, has an unknown one, or one of a wrong type."""


class RemoteProtocolError(TierdError):
    """The peer broke the protocol; its session ends, nothing else is touched."""


class RefusedError(TierdError):
    """The daemon understood the call and refuses it; the session goes on."""


class DisconnectedError(TierdError):
    """There is no session with a daemon; every call answers a miss."""


class BackendError(TierdError):
    """A storage tier as a whole could not do what it was asked."""


class HashInputError(TierdError, TypeError):
    """A value that canonical CBOR would silently hash as something else."""
