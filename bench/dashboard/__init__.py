"""`runstop dashboard`: the runs of a folder and its history in a browser on this machine; it only reads."""
