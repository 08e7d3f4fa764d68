"""Payment APIs as their public documentation describes them, each a server of this machine, and the file that describes it.

They stand for somebody else's systems: what an order became there is in `payments`, and is changed by a test (`end`).
"""
