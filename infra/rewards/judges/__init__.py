"""Models that judge: what they are asked, how their answers are read, what was paid, and the endpoint that is called."""
