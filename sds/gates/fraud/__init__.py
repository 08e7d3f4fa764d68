"""The fraud gate: which card payments may pass. Its payments and its customers are generated."""
