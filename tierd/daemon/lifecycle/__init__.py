"""The daemon's lifecycle: start, configuration, service manager, stop."""
