"""Host memory, and how it outlives the daemon."""
