"""Batches, token log-probabilities, objectives and the metrics that follow from them."""
