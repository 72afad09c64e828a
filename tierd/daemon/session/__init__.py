"""Clients: their sockets, their messages, and the daemon's answers."""
