"""A client of the decision service, sync and async."""
