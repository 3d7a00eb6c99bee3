"""The core of the gateway, without HTTP: the tokens of an episode on record, and the journal of its turns."""
