"""Runs the migrations over the connection it is given, in the transaction of whoever gave it."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table="migrations")
context.run_migrations()
