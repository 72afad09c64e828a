"""Clients: their sockets, what they may say, and what they are answered."""
