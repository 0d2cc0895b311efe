"""The run directory: what is on disk of a run, from its first round on."""
