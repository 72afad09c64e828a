"""What the daemon shows over HTTP: metrics and health."""
