"""Who starts the ranks."""
