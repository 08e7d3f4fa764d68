"""What runs beside the requests: recovery, webhooks, metrics, traces."""
