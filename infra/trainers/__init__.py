"""Ways to run the trainer program behind one border; see base.py."""
