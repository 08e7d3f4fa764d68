"""The refund gate: real flights, generated tickets, and a payment rail of their own process."""
