"""Memory shared by an engine and the daemon: mappings, exports, and the gate for writes."""
