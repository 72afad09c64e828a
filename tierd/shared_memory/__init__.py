"""Memory that an engine and the daemon share: mappings, what is shown of it, who may write."""
