"""Executors for any gate: one sends orders to a gateway by HTTP; a sandbox gateway serves for trials."""
