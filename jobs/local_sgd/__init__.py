"""Local SGD: groups of ranks take H inner steps each, and then average their weights."""
