"""Fitted readers: what a text or a row says, with probabilities."""

import os

# onnxruntime, when imported, makes an id of the machine, keeps a database of events in the user's cache and looks for its maker's
# server to send them to. It reads this once, as it is loaded: `disable_telemetry_events()` comes too late.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
