"""Local models behind one small protocol. Import the module you need: nothing is loaded here."""

import os

# llama.cpp's threads wait for each other about ten times a layer. There its OpenMP runtime by default spins for
# milliseconds before it sleeps: beside one other busy process a pass took 20 times as long. The value is read once, when
# the library is loaded; a value set by the operator stays.
os.environ.setdefault("GOMP_SPINCOUNT", "200")

# onnxruntime stores an id of the device in the user's cache folder and reports to its maker what runs in it. This is read once,
# when it is imported; its own `disable_telemetry_events()` comes too late.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
