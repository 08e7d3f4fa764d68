"""The fraud gate: it decides which card payments may pass. Payments and customers are generated."""
