"""The daemon's life: start, configuration, service manager, stop."""
