"""What a request for a decision says beside its event, and what was answered under a key before."""
