"""The Alembic migrations of the service's database."""
