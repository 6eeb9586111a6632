"""What trains, behind one protocol."""
