"""Code that uses Prefect but is not a task: caching, retries, artifacts, pages, prefetching."""
