"""A run folder: its files, its ledger, what came of its trials, and its summary in one line."""
