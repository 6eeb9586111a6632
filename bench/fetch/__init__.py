"""Download models and data sets: the only code of runstop that downloads anything."""
