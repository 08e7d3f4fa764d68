"""Make the table of the cases that somebody has taken at the console."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute(
        "CREATE TABLE taken (gate TEXT NOT NULL, dfid TEXT NOT NULL, key_digest TEXT NOT NULL, who TEXT NOT NULL,"
        " at_ms BIGINT NOT NULL, PRIMARY KEY (gate, dfid))"
    )
