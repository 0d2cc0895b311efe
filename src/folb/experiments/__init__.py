"""Experiments: their settings, their plan, and their execution in a run directory."""
