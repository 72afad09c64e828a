"""Models whose KV cache groups this connector does not serve, and what their users are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tierd_connectors.vllm.identity import namespace


def groups_of(*kinds: str) -> Any:
    """A KV cache config with one group of each of these specs."""
    specs = [type(kind, (), {"block_size": 32})() for kind in kinds]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


CONFIG = cast(
    Any,
    SimpleNamespace(
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, prefix_caching_hash_algo=namespace.HASH_ALGORITHM
        ),
        model_config=SimpleNamespace(),
    ),
)


@pytest.mark.parametrize(
    ("kinds", "remedy"),
    [
        (("FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowSpec"), True),
        (("FullAttentionSpec", "MambaSpec"), False),
        (("FullAttentionSpec", "SlidingWindowSpec", "MambaSpec"), False),
        (("FullAttentionSpec", "LaterSpec"), False),
    ],
)
def test_only_windows_have_the_remedy_of_one_group(kinds: tuple[str, ...], remedy: bool) -> None:
    """vLLM does not start with the option that the line names, or it is not named to Gemma."""
    with pytest.raises(namespace.UnsupportedEngineError) as refused:
        namespace.check_engine(CONFIG, groups_of(*kinds))
    text = str(refused.value)
    assert f"{len(kinds)} KV cache groups ({', '.join(sorted(set(kinds)))})" in text
    assert ("--disable-hybrid-kv-cache-manager" in text) == remedy


def test_a_group_of_windows_alone_is_refused_by_its_spec() -> None:
    """Blocks that left the window would be served as if they held KV."""
    with pytest.raises(namespace.UnsupportedEngineError, match="spec SlidingWindowSpec"):
        namespace.check_engine(CONFIG, groups_of("SlidingWindowSpec"))
