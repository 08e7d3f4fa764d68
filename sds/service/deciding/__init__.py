"""The terms of a request for a decision (deadline, waiting, idempotency key), and the answers kept under those keys."""
