"""Tables and text for the terminal, one file for each command's output."""
