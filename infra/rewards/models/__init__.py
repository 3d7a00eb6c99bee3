"""Reward models: a model with a head that gives a number, in a program of its own that is there only while samples are scored."""
