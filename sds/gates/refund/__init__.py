"""The refund gate: real flights, generated tickets, and a payment rail in a process of its own."""
