"""Make the tables of API keys, idempotency keys, webhooks with their positions, and console sessions."""

from alembic import op

revision = "0001"
down_revision = None

_STATEMENTS = """
CREATE TABLE api_keys (digest TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, roles TEXT NOT NULL,
    gates TEXT NOT NULL, made_at_ms BIGINT NOT NULL, revoked_at_ms BIGINT);
CREATE TABLE idempotency (caller TEXT NOT NULL, gate TEXT NOT NULL, key TEXT NOT NULL, fingerprint TEXT NOT NULL,
    event_id TEXT NOT NULL, dfid TEXT, status INTEGER, body {bytes}, made_at_ms BIGINT NOT NULL,
    PRIMARY KEY (caller, gate, key));
CREATE INDEX idempotency_by_age ON idempotency (made_at_ms);
CREATE TABLE webhooks (name TEXT PRIMARY KEY, url TEXT NOT NULL, secret TEXT NOT NULL, gates TEXT NOT NULL,
    made_at_ms BIGINT NOT NULL);
CREATE TABLE webhook_positions (webhook TEXT NOT NULL, gate TEXT NOT NULL, idx BIGINT NOT NULL, entry_hash TEXT NOT NULL,
    at_ms BIGINT NOT NULL, attempts INTEGER NOT NULL, next_at_ms BIGINT NOT NULL, failing_since_ms BIGINT, failure TEXT,
    PRIMARY KEY (webhook, gate));
CREATE TABLE sessions (digest TEXT PRIMARY KEY, key_digest TEXT NOT NULL, csrf TEXT NOT NULL,
    made_at_ms BIGINT NOT NULL, seen_at_ms BIGINT NOT NULL)
"""


def upgrade() -> None:
    kind = "BYTEA" if op.get_bind().dialect.name == "postgresql" else "BLOB"
    for statement in _STATEMENTS.split(";"):
        op.execute(statement.format(bytes=kind))
