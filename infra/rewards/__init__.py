"""Call rewards outside of the flow's process: a pool program with worker processes, and the flow's side of it."""
