"""What ranks find and measure on their nodes before a trial."""
