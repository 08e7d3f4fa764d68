"""Run the migrations over the caller's connection, within the caller's transaction."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table="migrations")
context.run_migrations()
