"""Replay: runs the daemon's policies over a trace of requests."""
