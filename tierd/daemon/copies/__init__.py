"""Copies that the daemon makes for engines."""
