"""What is asked of the service, one file a resource: each has a `router`."""
