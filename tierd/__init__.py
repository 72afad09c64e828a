"""tierd: a hierarchical KV offload daemon for LLM inference."""

__version__ = "0.1.0"
