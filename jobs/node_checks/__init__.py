"""Facts and measurements of nodes, collected by the ranks before a trial."""
