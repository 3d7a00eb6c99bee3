"""A simulator of runs on many GPUs: discrete events from recorded lengths and measured rates."""
