"""The decision service: serves the gates of this machine's home folder over HTTP."""
