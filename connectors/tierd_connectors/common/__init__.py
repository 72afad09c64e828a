"""Parts of a connector that know the daemon and no engine."""
