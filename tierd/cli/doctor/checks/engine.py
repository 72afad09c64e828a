"""An engine against this node's daemon: is tierd in it, and do both mean the same by a block."""

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
"""Longest wait for one answer of the engine."""

STORED_S: Final = 5.0
"""How long a computed block may take to be stored: that goes on beside the engine's work."""

POLL_S: Final = 0.05

PROBE_BLOCKS: Final = 3
"""Full blocks of the probe: vLLM stores none that the next step may still write to."""

HASH_ALGORITHM: Final = "sha256_cbor"

_ATTACH: Final = (
    "start vLLM with --kv-transfer-config "
    '\'{"kv_connector":"TierdConnector","kv_role":"kv_both"}\' and TIERD_SOCKET, if the socket is '
    "not the default; its log says in a line with `tierd:` why a connector is off"
)
_CACHE_INFO: Final = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_COUNTER: Final = re.compile(r"^vllm:tierd_(\w+)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def look_at_engine(url: str, socket: str, status: Mapping[str, object] | None) -> Iterator[Finding]:
    """The findings of the engine at `url`. Computes, and stores, one short prompt of noise."""
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
            "nobody is served",
            "see whether the engine runs and this is its address: its log, ss -ltn",
        )
        return
    except EngineRefusedError as error:
        yield Finding(
            Level.FAULT,
            "engine",
            "not_vllm",
            str(error),
            "what cannot be asked cannot be looked at",
            "name the address of a vLLM; VLLM_API_KEY holds its key, if it wants one",
        )
        return
    yield Finding(Level.OK, "engine", "engine", f"vLLM {version} answers at {url}")
    yield from _health(engine)
    yield from _settings(metrics)
    if status is None:
        return  # That no daemon answers is a finding already.
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
            f"no prompt could be tried: {error}",
            "whether engine and tierd mean the same by a block is not known",
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
            f"/health says that it does not work: {error}",
            "its core has died, and only its HTTP server still answers",
            "see its log, and restart it",
        )


def noise(length: int) -> list[int]:
    """Tokens that nobody has sent before. Every model has ids that are so small."""
    return [3 + secrets.randbelow(200) for _ in range(length)]


def _settings(metrics: str) -> Iterator[Finding]:
    """What the engine's own metrics say of its settings and of its connector."""
    info = _CACHE_INFO.search(metrics)
    labels = dict(_LABEL.findall(info[1])) if info else {}
    if labels.get("enable_prefix_caching") == "False":
        yield Finding(
            Level.FAULT,
            "engine",
            "no_prefix_caching",
            "the engine has prefix caching off",
            "tierd stays off",
            "start vLLM with --enable-prefix-caching",
        )
    algorithm = labels.get("prefix_caching_hash_algo", HASH_ALGORITHM)
    if algorithm != HASH_ALGORITHM:
        yield Finding(
            Level.FAULT,
            "engine",
            "hash_algorithm",
            f"the engine hashes blocks with {algorithm}",
            "nothing but that process can compute these hashes, so tierd stays off",
            f"start vLLM with --prefix-caching-hash-algo {HASH_ALGORITHM}",
        )
    counters: dict[str, float] = {}
    for name, value in _COUNTER.findall(metrics):
        counters[name] = counters.get(name, 0.0) + float(value)
    for name, what in (
        ("load_failures", "loads from tierd failed, and were recomputed"),
        ("errors", "errors of the connector were treated as misses"),
    ):
        if counters.get(name):
            yield Finding(
                Level.WARNING,
                "engine",
                name,
                f"{counters[name]:.0f} {what}",
                "each costs a request the time that it waited",
                "the engine's log has a line with `tierd:` for it; journalctl -u tierd",
            )


def _policy(status: Mapping[str, object]) -> Iterator[Finding]:
    if any(client.startswith("vllm-scheduler") for client in table(status.get("clients", {}))):
        yield Finding(
            Level.OK,
            "engine",
            "load_failure_policy",
            'the connector sets kv_load_failure_policy to "recompute" itself, but not around it: '
            "inside a MultiConnector set it in the outer --kv-transfer-config",
        )


def _probe(
    engine: EngineServer, model: str, socket: str, status: Mapping[str, object]
) -> Iterator[Finding]:
    """Whether a prompt's first block is stored under the hash that tierd computes for it."""
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
            "no engine has registered its blocks with this tierd",
            "nothing is stored, and nothing found",
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
            f"the daemon does not say where blocks are: {error}",
            "whether engine and tierd mean the same by a block is not known",
            "restart tierd if it is of another version than this command",
        )


def _nothing_stored() -> Finding:
    return Finding(
        Level.FAULT,
        "engine",
        "nothing_stored",
        f"a prompt was computed, and {STORED_S:g} s later tierd had stored nothing",
        "what is not stored is not found later",
        "see whether this engine is one of those attached to this tierd (tierd status), and in "
        "`tierd status` whether stores are refused for want of room; " + _ATTACH,
    )


def _drift(
    operator: Operator, tokens: list[int], spaces: list[dict[str, object]], stored: int
) -> Finding:
    """The engine stored, but not what was computed here: find out which seed it uses."""
    seeds: dict[str, str | None] = {"unset": None}
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        seeds[repr(seed)] = seed
    uses = []
    for space in spaces:
        for name, seed in seeds.items():
            first = _first_hash(tokens, space, root_hash(seed))
            if _is_there(operator, str(space["digest"]), first):
                uses.append(f"it hashes as with PYTHONHASHSEED {name}")
            elif space["hash_root"] == root_hash(seed).hex():
                uses.append(f"its namespace is that of PYTHONHASHSEED {name}")
    return Finding(
        Level.FAULT,
        "engine",
        "hash_drift",
        f"{stored} blocks were stored meanwhile, but none under the hash that tierd computes for "
        "the prompt" + "".join(f"; {each}" for each in dict.fromkeys(uses)),
        "no other engine, and neither `tierd warm` nor `tierd explain`, finds these blocks",
        "give all processes of the engine the same PYTHONHASHSEED, or none; "
        f"--prefix-caching-hash-algo {HASH_ALGORITHM}; on a busy engine ask again, for it may have "
        "been another's blocks",
    )


def _first_hash(tokens: list[int], space: Mapping[str, object], root: bytes) -> bytes:
    block_tokens = whole(space["block_tokens"])
    return hash_blocks(tokens[:block_tokens], block_tokens, parent=root)[0]


def _wait(operator: Operator, wanted: Mapping[str, bytes]) -> str | None:
    """The namespace that has its block before STORED_S are over."""
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
