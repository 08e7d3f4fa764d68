"""Executors that serve any gate: an order to a gateway by HTTP, and a gateway to try it on."""
