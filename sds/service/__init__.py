"""The decision service: gates of this home, asked over HTTP."""
