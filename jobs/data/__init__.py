"""Rows of tokens, and one file for each source."""
