"""What crosses the border between bench and jobs: the plan that goes in, the log that comes out."""
