"""The identity of an engine's KV: its weights, settings and environment variables."""
