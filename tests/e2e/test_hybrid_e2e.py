"""A model with sliding windows: refused with the remedy, and served with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.engines.vllm_engine import Engine, prompt, whole_blocks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [prompt(length, length) for length in (90, 300, 517)]
"""Shorter than the window of 96 tokens, and longer."""

TOKENS = 12


def test_sliding_windows_need_one_kv_cache_group(tmp_path: Path) -> None:
    """A user of Gemma would not know how to use tierd, or get other tokens once they do."""
    with DaemonProcess(tmp_path) as daemon:
        with Engine(tmp_path, daemon.socket, shape="windows") as engine:
            expected = [engine.generate([one], tokens=TOKENS)["tokens"][0] for one in PROMPTS]
            assert "--disable-hybrid-kv-cache-manager" in engine.call("stats")["off"]
        assert daemon.status()["host"]["blocks"] == 0
        one_group = {"disable_hybrid_kv_cache_manager": True}
        with Engine(tmp_path, daemon.socket, shape="windows", llm=one_group) as engine:
            for one, tokens in zip(PROMPTS, expected, strict=True):
                assert engine.generate([one], tokens=TOKENS)["tokens"] == [tokens]
            engine.wait_stored(daemon, sum(whole_blocks(len(one)) // 32 for one in PROMPTS))
            engine.reset()
            for one, tokens in zip(PROMPTS, expected, strict=True):
                again = engine.generate([one], tokens=TOKENS)
                assert again["cached"] == [whole_blocks(len(one))]
                assert again["tokens"] == [tokens]
            assert engine.settled()["external_hits"] == sum(whole_blocks(len(p)) for p in PROMPTS)
