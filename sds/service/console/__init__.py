"""The console: web pages under /console for reviewers and operators (waiting cases, single decisions, live figures, halt).

The server renders the pages. Without scripts a browser loses the live page's refresh, the list's keys and the guards against
sending a form twice, which the kernel has, too.
"""

from __future__ import annotations

from sds.service.console import actions, routes

__all__ = ["actions", "router"]

router = routes.router  # with the routes that importing `actions` adds
