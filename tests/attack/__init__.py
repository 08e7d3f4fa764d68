"""An attack on the product from outside: `python -m tests.attack` (`SDS_TEST_SCALE=full` for the sizes of issue 31)."""
