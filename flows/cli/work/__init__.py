"""Commands that make or change runs, one file each."""
