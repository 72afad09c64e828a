"""Storage tiers that ship with tierd; each knows only `tierd.backend`."""
