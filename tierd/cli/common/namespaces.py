"""Finds the namespaces of a command: the given ones, or those of the only engine.

The ranks of one engine belong together: their blocks have the same hashes, and a prefix is usable
only if all ranks have it. A LoRA adapter has its own namespaces: their weights are those of the
base model followed by "+lora:NAME=REVISION".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from tierd.cli.common.digests import check_digits, listed, resolve
from tierd.cli.common.operator import Operator, tables
from tierd.cli.common.text import printable
from tierd.errors import ConfigError, RefusedError
from tierd.types import DIGEST_BYTES, Namespace

ADAPTER_MARK: Final = "+lora:"
"""Separates the base model's weights from the adapter in an adapter namespace's weights."""

Ranks = tuple[Namespace, ...]
"""The namespaces of an engine's ranks on this node, one per rank."""


class Namespaces:
    """The namespaces that a daemon knows or that `learn` has added."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._known: dict[bytes, Namespace] = {}

    def learn(self, namespaces: Iterable[Namespace]) -> None:
        """Add namespaces that a file defines."""
        self._known.update((namespace.digest, namespace) for namespace in namespaces)

    def named(self, given: object) -> Namespace:
        """Return the namespace given by its fields (`hash_root` in hex) or its first digits.

        Raises ConfigError, which lists the known namespaces if the digest is unknown.
        """
        if isinstance(given, dict):
            namespace = from_json(given)
            self.learn([namespace])
            return namespace
        if not isinstance(given, str):
            raise ConfigError(
                f"a namespace must be an object with its fields, or a digest, not {given!r:.40}"
            )
        try:
            check_digits(given)
        except ConfigError as error:
            raise ConfigError(f"{given!r:.80} is neither a file nor a digest: {error}") from error
        # Ask the daemon again for a partial digest: a new namespace may begin with it as well.
        whole = len(given) == 2 * DIGEST_BYTES and bytes.fromhex(given) in self._known
        if not whole:
            self._ask()
        known = {digest.hex(): shown(each) for digest, each in self._known.items()}
        return self._known[bytes.fromhex(resolve(given, known))]

    def given(self, words: Iterable[str]) -> Ranks:
        """Return the ranks given by --namespace: for each rank a file of its fields or a digest."""
        return self.ranks(map(_of_word, words))

    def ranks(self, given: Iterable[object]) -> Ranks:
        """Return the ranks of a prompt, each given by its fields or its digest."""
        return ranks(map(self.named, given))

    def only(self) -> Ranks:
        """Return all known ranks of the only engine. Raises ConfigError if there is not exactly
        one engine."""
        self._ask()
        engines = [n for n in self._known.values() if ADAPTER_MARK not in n.weights]
        families = {namespace.family for namespace in engines}
        places = {_place(namespace) for namespace in engines}
        if not engines:
            raise ConfigError("pass --namespace FILE: tierd knows no namespace yet")
        if len(families) > 1 or len(places) < len(engines):
            raise ConfigError(
                f"pass --namespace: tierd knows more than one engine: {self._listed()}"
            )
        return ranks(engines)

    def adapter(self, base: Ranks, name: str) -> Ranks:
        """Return an adapter's ranks on top of `base`. Raises ConfigError unless tierd knows exactly
        one revision."""
        self._ask()
        found: list[Namespace] = []
        for rank in base:
            start = f"{rank.weights}{ADAPTER_MARK}{name}="
            found += [
                other
                for other in self._known.values()
                if other.weights.startswith(start) and replace(other, weights=rank.weights) == rank
            ]
        revisions = {namespace.weights for namespace in found}
        if len(revisions) != 1 or len(found) != len(base):
            count = "no namespace" if not found else f"{len(revisions)} revisions"
            raise ConfigError(
                f"tierd knows {count} of the adapter {printable(name)} for this model; the "
                f"connector's option `loras` names it, and tierd knows: {self._listed()}"
            )
        return ranks(found)

    def has_adapter(self, name: str) -> bool:
        """Return whether a known namespace belongs to an adapter of that name."""
        self._ask()
        return any(f"{ADAPTER_MARK}{name}=" in known.weights for known in self._known.values())

    def _ask(self) -> None:
        """Add all namespaces that the daemon knows now."""
        for space in tables(self._operator.status()["namespaces"]):
            digest = bytes.fromhex(str(space["digest"]))
            if digest not in self._known:
                try:
                    self._known[digest] = self._operator.describe(digest)
                except RefusedError:
                    continue  # The daemon has just dropped it.

    def _listed(self) -> str:
        return listed(map(shown, self._known.values()))


def add_namespace(group: argparse._ArgumentGroup) -> None:
    """Add --namespace."""
    group.add_argument(
        "--namespace",
        action="append",
        metavar="FILE|DIGEST",
        help="a JSON file with a namespace's fields, or the first digits of a digest that the "
        "daemon knows; once per rank of the engine (default: all ranks of the only engine)",
    )


def ranks(namespaces: Iterable[Namespace]) -> Ranks:
    """Return the namespaces in rank order. Raises ConfigError if they are not the distinct ranks
    of one engine."""
    found = sorted(set(namespaces), key=_place)
    if not found:
        raise ConfigError("no namespace is given: pass one per rank")
    if len({namespace.family for namespace in found}) > 1:
        raise ConfigError("the namespaces of one prompt must be the ranks of one engine")
    if len({_place(namespace) for namespace in found}) < len(found):
        raise ConfigError("two of the given namespaces are the same rank: pass one per rank")
    return tuple(found)


def shown(namespace: Namespace) -> str:
    """Describe a namespace for a message."""
    return (
        f"{namespace.digest.hex()} ({printable(namespace.model)}, "
        f"weights {printable(namespace.weights)}, rank {namespace.tp_rank})"
    )


def from_json(fields: dict[str, object]) -> Namespace:
    """Return a namespace from its JSON fields, `hash_root` in hex. Raises ConfigError."""
    root = fields.get("hash_root")
    try:
        raw = bytes.fromhex(root) if isinstance(root, str) else root
    except ValueError as error:
        raise ConfigError("namespace field 'hash_root' must be in hex") from error
    return Namespace.from_fields({**fields, "hash_root": raw} if "hash_root" in fields else fields)


def _of_word(word: str) -> object:
    path = Path(word)
    if not path.is_file():
        return word
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{word}: {error}") from error


def _place(namespace: Namespace) -> tuple[int, int, int]:
    return namespace.pp_rank, namespace.tp_rank, namespace.cp_rank
