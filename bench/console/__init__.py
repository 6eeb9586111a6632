"""What is printed: one file for each thing that is shown."""
