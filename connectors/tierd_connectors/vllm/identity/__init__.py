"""What decides what an engine's KV means: its weights, settings and variables."""
