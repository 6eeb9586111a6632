"""What runs inside a job, once per rank."""
