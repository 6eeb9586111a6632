"""What trials measured: the result of each kind of task, and how two systems compare."""
