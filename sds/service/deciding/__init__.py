"""One request for a decision: what it asks, whether it can be had, what was answered before."""
