"""The simulator: rounds, runs and searches as compiled programs."""
