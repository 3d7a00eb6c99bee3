"""The forms that rows come in: text, lists of chat messages, verl's and TRL's layouts."""
