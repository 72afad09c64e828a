"""Simulated worlds: the daemon's own code on virtual time, among parts that misbehave."""
