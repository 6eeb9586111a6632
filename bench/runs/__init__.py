"""Run folders, ledgers and trials."""
