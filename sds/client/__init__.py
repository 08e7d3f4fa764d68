"""A client of the decision service, sync and async.

    from sds.client import DecisionClient

    with DecisionClient("https://decisions.example", key) as client:
        answer = client.decide("refund", {"claim_id": "...", "ticket_id": "...", "claim_text": "..."})

It gives what a gate of one's own gives, an `Answer`, and raises what a gate raises: `UsageError`, your mistake, or
`WorldError`, the service, the network or what lies behind. It needs neither a model nor the extra `service`.
"""

from sds.client.asynchronous import AsyncDecisionClient
from sds.client.blocking import DecisionClient
from sds.client.replies import Changed

__all__ = ["AsyncDecisionClient", "Changed", "DecisionClient"]
