"""MLflow, behind one door: what a step leaves on disk goes into the store once and in order."""
