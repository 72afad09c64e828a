"""What-would-have-been: the daemon's own policies over a trace of requests."""
