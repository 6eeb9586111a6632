"""What every rank is and does, whatever it runs."""
