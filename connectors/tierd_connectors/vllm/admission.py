"""Which of vLLM's requests may be looked up and stored: the KV of the others is not identified."""

from __future__ import annotations

from collections.abc import Mapping

from tierd_connectors.common.namespaces import NO_ADAPTER


def adapter_of(lora: object, revisions: Mapping[str, str]) -> str | None:
    """Return the name of a request's adapter; None if its weights are not known.

    A block hash covers an adapter's name and path, and both can stay while the weights change. So
    the settings must name its revision, and the running engine must not have replaced it in place.
    """
    if lora is None:
        return NO_ADAPTER
    name = getattr(lora, "lora_name", None)
    if name not in revisions or getattr(lora, "load_inplace", False):
        return None
    return str(name)


def names_its_kv(request: object, *, media_trusted: bool) -> bool:
    """Whether the request allows caching, and its block hashes identify its KV with certainty.

    A resumable session can take back computed tokens. A client may choose an image's identifier, or
    a part of it; it looks like an identifier that was computed from the image.
    """
    return not (
        (getattr(request, "mm_features", None) and not media_trusted)
        or getattr(request, "resumable", False)
        or getattr(request, "skip_reading_prefix_cache", False)
    )
