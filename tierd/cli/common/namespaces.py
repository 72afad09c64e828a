"""Which namespaces a command means: those it is given, or the only ones there are.

The ranks of one engine go together: their blocks have the same hashes, and a prefix is of use
only where all of them have it. A LoRA adapter's blocks are in namespaces of their own, whose
weights are those of the base model and then "+lora:NAME=REVISION".
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
"""In the weights of an adapter's namespace, after those of the base model."""

Ranks = tuple[Namespace, ...]
"""The namespaces of an engine's ranks on this node, each rank once."""


class Namespaces:
    """The namespaces that a daemon knows, and whatever else `learn` was told."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._known: dict[bytes, Namespace] = {}

    def learn(self, namespaces: Iterable[Namespace]) -> None:
        """Namespaces that a file brings along: they can be meant too."""
        self._known.update((namespace.digest, namespace) for namespace in namespaces)

    def named(self, given: object) -> Namespace:
        """The namespace of its fields (`hash_root` in hex) or its digest's first digits.

        Raises ConfigError, which lists the known ones for a digest that is none of them.
        """
        if isinstance(given, dict):
            namespace = from_json(given)
            self.learn([namespace])
            return namespace
        if not isinstance(given, str):
            raise ConfigError(
                f"a namespace is an object of its fields or a digest, not {given!r:.40}"
            )
        try:
            check_digits(given)
        except ConfigError as error:
            raise ConfigError(f"{given!r:.80} is neither a file nor a digest: {error}") from error
        # Another one that begins alike may have come since, so it is asked in any case.
        whole = len(given) == 2 * DIGEST_BYTES and bytes.fromhex(given) in self._known
        if not whole:
            self._ask()
        known = {digest.hex(): shown(each) for digest, each in self._known.items()}
        return self._known[bytes.fromhex(resolve(given, known))]

    def given(self, words: Iterable[str]) -> Ranks:
        """Those of --namespace: a file of its fields or a digest, for each rank."""
        return self.ranks(map(_of_word, words))

    def ranks(self, given: Iterable[object]) -> Ranks:
        """Those of a prompt, each its fields or its digest."""
        return ranks(map(self.named, given))

    def only(self) -> Ranks:
        """All known ranks of the only engine; ConfigError lists what there is if it is not one."""
        self._ask()
        engines = [n for n in self._known.values() if ADAPTER_MARK not in n.weights]
        families = {namespace.family for namespace in engines}
        places = {_place(namespace) for namespace in engines}
        if not engines:
            raise ConfigError("give --namespace: tierd knows none yet")
        if len(families) > 1 or len(places) < len(engines):
            raise ConfigError(
                f"give --namespace: tierd knows those of more than one engine: {self._listed()}"
            )
        return ranks(engines)

    def adapter(self, base: Ranks, name: str) -> Ranks:
        """Those of an adapter on top of `base`; ConfigError if it is not just one revision."""
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
        """Whether some namespace is of an adapter of that name."""
        self._ask()
        return any(f"{ADAPTER_MARK}{name}=" in known.weights for known in self._known.values())

    def _ask(self) -> None:
        """Learn all that the daemon knows by now."""
        for space in tables(self._operator.status()["namespaces"]):
            digest = bytes.fromhex(str(space["digest"]))
            if digest not in self._known:
                try:
                    self._known[digest] = self._operator.describe(digest)
                except RefusedError:
                    continue  # It has just gone.

    def _listed(self) -> str:
        return listed(map(shown, self._known.values()))


def add_namespace(group: argparse._ArgumentGroup) -> None:
    """Add --namespace."""
    group.add_argument(
        "--namespace",
        action="append",
        metavar="FILE|DIGEST",
        help="a JSON file of its fields, or the first digits of the digest of one that the daemon "
        "knows; once for each rank of an engine (default: those of its only engine)",
    )


def ranks(namespaces: Iterable[Namespace]) -> Ranks:
    """The ranks of one engine, in order; raises ConfigError if they are not that."""
    found = sorted(set(namespaces), key=_place)
    if not found:
        raise ConfigError("no namespace is given")
    if len({namespace.family for namespace in found}) > 1:
        raise ConfigError("the namespaces of one prompt must be the ranks of one engine")
    if len({_place(namespace) for namespace in found}) < len(found):
        raise ConfigError("two of the namespaces are the same rank")
    return tuple(found)


def shown(namespace: Namespace) -> str:
    """As a message names one."""
    return (
        f"{namespace.digest.hex()} ({printable(namespace.model)}, "
        f"weights {printable(namespace.weights)}, rank {namespace.tp_rank})"
    )


def from_json(fields: dict[str, object]) -> Namespace:
    """A namespace as JSON has it, the root of hashes in hex. Raises ConfigError."""
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
