"""The parts of a federated algorithm, and the algorithms: pure functions that both carriers run."""
