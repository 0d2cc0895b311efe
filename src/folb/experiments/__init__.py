"""Experiments: their settings, their plan, and carrying them out in a run directory."""
