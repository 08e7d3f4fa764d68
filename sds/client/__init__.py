"""A client of the decision service, synchronous and asynchronous.

    from sds.client import DecisionClient

    with DecisionClient("https://decisions.example", key) as client:
        answer = client.decide("refund", {"claim_id": "...", "ticket_id": "...", "claim_text": "..."})

A call returns an `Answer` and raises errors as a local gate does: `UsageError` for your mistake, `WorldError` for a failure
of the service, the network, or what the service depends on. It needs neither a model nor the extra `service`.
"""

from sds.client.asynchronous import AsyncDecisionClient
from sds.client.blocking import DecisionClient
from sds.client.replies import Changed

__all__ = ["AsyncDecisionClient", "Changed", "DecisionClient"]
