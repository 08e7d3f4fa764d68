"""Local models behind one small protocol. Import the module you need: nothing is loaded here."""

import os

# llama.cpp's threads wait for each other about ten times a layer, and its OpenMP runtime by default spins there for
# milliseconds before it sleeps: next to one other busy process a pass took 20 times as long. It reads this once, when
# it is loaded; a value set by the operator stays.
os.environ.setdefault("GOMP_SPINCOUNT", "200")

# onnxruntime keeps an id of the device in the user's cache folder and sends its maker what runs in it. It asks once, when it
# is imported; its own `disable_telemetry_events()` comes too late.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
