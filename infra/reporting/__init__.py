"""Pages for people: headline metrics, warnings, time line, curves."""
