"""Commands that show something and change nothing, one file each."""
