"""The run directory: the files of a run, from its first round on."""
