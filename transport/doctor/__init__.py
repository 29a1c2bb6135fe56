"""`transport doctor`: is this host ready, and if not, what to type."""
