"""Setting a machine up: the environments from their locks, templates of work pools."""
