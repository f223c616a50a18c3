"""Public data sets in the file format of a run."""
