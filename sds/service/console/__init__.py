"""Pages for people, under /console: what waits for a human, one case at a time, what is decided now, and who may stop it.

They are made here, on the server; without scripts a browser loses only that the live page renews itself.
"""

from __future__ import annotations

from sds.service.console import actions, routes

__all__ = ["actions", "router"]

router = routes.router  # and the routes that `actions` has added
