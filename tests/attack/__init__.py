"""An attack on the product from outside: `python -m tests.attack`, with `SDS_TEST_SCALE=full` at full size."""
