"""Checks of an engine: does it use this node's tierd, and do both agree on block hashes?"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Final

from tierd.cli.common.engine import EngineAwayError, EngineRefusedError, EngineServer
from tierd.cli.common.namespaces import ADAPTER_MARK
from tierd.cli.common.operator import Operator, table, tables, whole
from tierd.cli.doctor.checks.finding import Finding, Level
from tierd.errors import HashInputError, RefusedError, TierdError
from tierd.hashing import hash_blocks, root_hash

ENGINE_S: Final = 5.0
"""Longest wait for one answer from the engine."""

STORED_S: Final = 5.0
"""Longest wait until a computed block is stored. The engine stores it asynchronously."""

POLL_S: Final = 0.05

PROBE_BLOCKS: Final = 3
"""Full blocks in the probe prompt. vLLM stores no block that the next step may still write."""

HASH_ALGORITHM: Final = "sha256_cbor"

_ATTACH: Final = (
    "start vLLM with --kv-transfer-config "
    '\'{"kv_connector":"TierdConnector","kv_role":"kv_both"}\'; set TIERD_SOCKET if the socket is '
    "not the default; if the connector is off, a `tierd:` line in the engine's log says why"
)
_CACHE_INFO: Final = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_COUNTER: Final = re.compile(r"^vllm:tierd_(\w+)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def look_at_engine(url: str, socket: str, status: Mapping[str, object] | None) -> Iterator[Finding]:
    """Check the engine at `url`. The engine computes and stores one short random prompt."""
    engine = EngineServer(url, ENGINE_S)
    try:
        version = engine.version()
        models = engine.models()
        metrics = engine.text("/metrics")
    except EngineAwayError as error:
        yield Finding(
            Level.FAULT,
            "engine",
            "engine_away",
            str(error),
            "the engine serves no requests",
            "check that the engine runs and that this is its address: its log, ss -ltn",
        )
        return
    except EngineRefusedError as error:
        yield Finding(
            Level.FAULT,
            "engine",
            "not_vllm",
            str(error),
            "the engine could not be checked",
            "pass the address of a vLLM server; set VLLM_API_KEY if it requires a key",
        )
        return
    yield Finding(Level.OK, "engine", "engine", f"vLLM {version} answers at {url}")
    yield from _health(engine)
    yield from _settings(metrics)
    if status is None:
        return  # Another check reports that no daemon answers.
    yield from _policy(status)
    base = next((model for model in models if not model.get("parent")), None)
    if base is None:
        return
    try:
        yield from _probe(engine, str(base["id"]), socket, status)
    except (EngineAwayError, EngineRefusedError, HashInputError) as error:
        yield Finding(
            Level.WARNING,
            "engine",
            "no_probe",
            f"the test prompt failed: {error}",
            "it is unknown whether engine and tierd compute the same block hashes",
            "try again when the engine is idle; it must serve /v1/completions",
        )


def _health(engine: EngineServer) -> Iterator[Finding]:
    try:
        engine.text("/health")
    except (EngineAwayError, EngineRefusedError) as error:
        yield Finding(
            Level.FAULT,
            "engine",
            "engine_sick",
            f"the engine's /health reports a failure: {error}",
            "the engine core has died; only its HTTP server still answers",
            "read the engine's log and restart the engine",
        )


def noise(length: int) -> list[int]:
    """Return random token ids, 3 to 202: no cache has the prompt, and every model has the ids."""
    return [3 + secrets.randbelow(200) for _ in range(length)]


def _settings(metrics: str) -> Iterator[Finding]:
    """Check the engine's settings and its connector by the engine's metrics."""
    info = _CACHE_INFO.search(metrics)
    labels = dict(_LABEL.findall(info[1])) if info else {}
    if labels.get("enable_prefix_caching") == "False":
        yield Finding(
            Level.FAULT,
            "engine",
            "no_prefix_caching",
            "prefix caching is off in the engine",
            "tierd stays off in this engine",
            "start vLLM with --enable-prefix-caching",
        )
    algorithm = labels.get("prefix_caching_hash_algo", HASH_ALGORITHM)
    if algorithm != HASH_ALGORITHM:
        yield Finding(
            Level.FAULT,
            "engine",
            "hash_algorithm",
            f"the engine hashes blocks with {algorithm}",
            "no other process can compute these hashes, so tierd stays off",
            f"start vLLM with --prefix-caching-hash-algo {HASH_ALGORITHM}",
        )
    counters: dict[str, float] = {}
    for name, value in _COUNTER.findall(metrics):
        counters[name] = counters.get(name, 0.0) + float(value)
    for name, what in (
        ("load_failures", "loads from tierd failed and were recomputed"),
        ("errors", "connector errors were treated as misses"),
    ):
        if counters.get(name):
            yield Finding(
                Level.WARNING,
                "engine",
                name,
                f"{counters[name]:.0f} {what}",
                "each one delayed a request",
                "read the `tierd:` lines in the engine's log, and journalctl -u tierd",
            )


def _policy(status: Mapping[str, object]) -> Iterator[Finding]:
    if any(client.startswith("vllm-scheduler") for client in table(status.get("clients", {}))):
        yield Finding(
            Level.OK,
            "engine",
            "load_failure_policy",
            'the connector sets kv_load_failure_policy to "recompute" for itself only: with a '
            "MultiConnector, set it in the outer --kv-transfer-config",
        )


def _probe(
    engine: EngineServer, model: str, socket: str, status: Mapping[str, object]
) -> Iterator[Finding]:
    """Check that a prompt's first block is stored under the hash that tierd computes for it."""
    spaces = [
        space
        for space in tables(status["namespaces"])
        if space["sessions"] and ADAPTER_MARK not in str(space["weights"])
    ]
    if not spaces:
        yield Finding(
            Level.FAULT,
            "engine",
            "not_attached",
            "no engine is connected to this tierd",
            "tierd stores and finds no blocks",
            _ATTACH,
        )
        return
    length = PROBE_BLOCKS * max(whole(space["block_tokens"]) for space in spaces) + 1
    tokens = noise(length)
    engine.compute(tokens, model=model, salt=None)
    wanted = {
        str(space["digest"]): _first_hash(tokens, space, bytes.fromhex(str(space["hash_root"])))
        for space in spaces
    }
    try:
        with Operator(socket, "tierd doctor") as operator:
            found = _wait(operator, wanted)
            if found is not None:
                yield Finding(
                    Level.OK,
                    "engine",
                    "hashes_agree",
                    f"a prompt was stored under the hash that tierd computes for it (namespace "
                    f"{found}): hash algorithm, PYTHONHASHSEED and block size agree",
                )
                return
            before, after = _stored(status), _stored(operator.status())
            if after <= before:
                yield _nothing_stored()
                return
            yield _drift(operator, tokens, spaces, after - before)
    except (RefusedError, TierdError) as error:
        yield Finding(
            Level.WARNING,
            "engine",
            "no_probe",
            f"the daemon did not report where blocks are: {error}",
            "it is unknown whether engine and tierd compute the same block hashes",
            "restart tierd if its version differs from this command's",
        )


def _nothing_stored() -> Finding:
    return Finding(
        Level.FAULT,
        "engine",
        "nothing_stored",
        f"the engine computed a prompt, but tierd stored no block within {STORED_S:g} s",
        "later requests find none of this engine's blocks",
        "check in `tierd status` that this engine is connected and that stores are not refused "
        "for lack of space; " + _ATTACH,
    )


def _drift(
    operator: Operator, tokens: list[int], spaces: list[dict[str, object]], stored: int
) -> Finding:
    """Report that the engine stored blocks under other hashes, and try to find its seed."""
    seeds: dict[str, str | None] = {"unset": None}
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        seeds[repr(seed)] = seed
    uses = []
    for space in spaces:
        for name, seed in seeds.items():
            first = _first_hash(tokens, space, root_hash(seed))
            if _is_there(operator, str(space["digest"]), first):
                uses.append(f"its hashes match PYTHONHASHSEED {name}")
            elif space["hash_root"] == root_hash(seed).hex():
                uses.append(f"its namespace matches PYTHONHASHSEED {name}")
    return Finding(
        Level.FAULT,
        "engine",
        "hash_drift",
        f"{stored} blocks were stored, but none under the hash that tierd computes for the test "
        "prompt" + "".join(f"; {each}" for each in dict.fromkeys(uses)),
        "other engines, `tierd warm` and `tierd explain` do not find these blocks",
        "set the same PYTHONHASHSEED in all processes of the engine, or leave it unset in all; use "
        f"--prefix-caching-hash-algo {HASH_ALGORITHM}; if the engine is busy, run tierd doctor "
        "again: the stored blocks may belong to other requests",
    )


def _first_hash(tokens: list[int], space: Mapping[str, object], root: bytes) -> bytes:
    block_tokens = whole(space["block_tokens"])
    return hash_blocks(tokens[:block_tokens], block_tokens, parent=root)[0]


def _wait(operator: Operator, wanted: Mapping[str, bytes]) -> str | None:
    """Return the digest of the first namespace that has its block, None after STORED_S."""
    end_s = time.monotonic() + STORED_S
    while True:
        for digest, block_hash in wanted.items():
            if _is_there(operator, digest, block_hash):
                return digest
        if time.monotonic() >= end_s:
            return None
        time.sleep(POLL_S)


def _is_there(operator: Operator, digest: str, block_hash: bytes) -> bool:
    [block] = tables(operator.explain(bytes.fromhex(digest), [block_hash])["blocks"])
    return bool(block["host"] or block["tiers"])


def _stored(status: Mapping[str, object]) -> int:
    return whole(table(status["counters"]).get("stored_blocks_total", 0))
