"""From a data set's rows to prompts of token ids, and from rewards to advantages."""
