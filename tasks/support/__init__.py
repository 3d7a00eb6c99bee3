"""What knows Prefect and is no task: caching, retries, artifacts, pages, prefetching."""
