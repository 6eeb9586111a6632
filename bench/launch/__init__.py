"""Launch, resume and cancel runs."""
