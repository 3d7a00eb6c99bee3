"""WITH WHAT: everything that lives without Prefect."""
