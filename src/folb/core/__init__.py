"""What a federated algorithm is made of, and the algorithms: pure functions that both carriers run."""
