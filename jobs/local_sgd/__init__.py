"""Local SGD: groups of ranks take steps of their own, and average their weights every H steps."""
