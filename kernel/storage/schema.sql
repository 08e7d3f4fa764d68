-- The durable record. Times are milliseconds since 1970, amounts are minor units, hashes are 64 hex digits.
-- The five tables joined in DIR 4.2 keep its column names.
-- WITHOUT ROWID keeps whole rows in the key's own tree: faster for short rows, slower for long ones.

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE contracts (
    hash TEXT PRIMARY KEY, gate TEXT NOT NULL, agent_id TEXT NOT NULL, version TEXT NOT NULL,
    mission_hash TEXT NOT NULL, body TEXT NOT NULL, registered_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE agents (
    agent_id TEXT PRIMARY KEY, gate TEXT NOT NULL UNIQUE, contract_hash TEXT NOT NULL REFERENCES contracts,
    status TEXT NOT NULL CHECK (status IN ('INITIALIZING', 'ACTIVE', 'SUSPENDED', 'ESCALATED', 'RETIRED')),
    rejections INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    gate TEXT NOT NULL, event_id TEXT NOT NULL, body_hash TEXT NOT NULL, dfid TEXT NOT NULL,
    PRIMARY KEY (gate, event_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE decision_flows (
    dfid TEXT PRIMARY KEY, agent_id TEXT NOT NULL, trigger_event TEXT NOT NULL, parent_dfid TEXT,
    gate TEXT NOT NULL, event_id TEXT NOT NULL, contract_hash TEXT NOT NULL, restarts INTEGER NOT NULL,
    created_at_ms INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('CREATED', 'ACTIVE', 'VALIDATING', 'ACCEPTED', 'EXECUTING', 'CLOSED',
                                         'ABORTED', 'ESCALATED')),
    tag TEXT, lease_until_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX flows_unfinished ON decision_flows (state) WHERE state IN ('ACTIVE', 'EXECUTING');

CREATE TABLE context_snapshots (
    dfid TEXT PRIMARY KEY, snapshot_id TEXT NOT NULL, body TEXT NOT NULL, envelope_hash TEXT NOT NULL,
    envelope TEXT NOT NULL, prompt TEXT NOT NULL, security TEXT NOT NULL, taken_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE policy_proposals (
    dfid TEXT PRIMARY KEY, agent_id TEXT NOT NULL, policy_kind TEXT, params TEXT, context_ref TEXT,
    justification TEXT, confidence REAL, proposal BLOB NOT NULL, model TEXT NOT NULL, alternatives TEXT NOT NULL,
    tokens INTEGER NOT NULL, passes INTEGER NOT NULL, duration_ms REAL NOT NULL
) STRICT;

CREATE TABLE dim_validations (
    dfid TEXT PRIMARY KEY, outcome TEXT NOT NULL CHECK (outcome IN ('ACCEPTED', 'REJECTED', 'ESCALATED')),
    gate_reached INTEGER NOT NULL, reason_code TEXT, reasons TEXT NOT NULL, drift TEXT,
    attempt_number INTEGER NOT NULL, evaluated_at_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE attempts (
    dfid TEXT NOT NULL, attempt_number INTEGER NOT NULL, proposal BLOB NOT NULL, reasons TEXT NOT NULL,
    tokens INTEGER NOT NULL, evaluated_at_ms INTEGER NOT NULL, PRIMARY KEY (dfid, attempt_number)
) STRICT;

CREATE TABLE execution_log (
    dfid TEXT PRIMARY KEY, idempotency_key TEXT NOT NULL UNIQUE, step_id TEXT NOT NULL, kind TEXT NOT NULL,
    params TEXT NOT NULL, resource_key TEXT NOT NULL, state_version TEXT NOT NULL, signature TEXT NOT NULL,
    reserved_at_ms INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('PENDING', 'SUCCESS', 'FAILED', 'UNKNOWN', 'DIRTY')),
    external_receipt TEXT, executed_at_ms INTEGER
) STRICT;

CREATE TABLE reservations (
    dfid TEXT NOT NULL, resource TEXT NOT NULL, amount INTEGER NOT NULL CHECK (amount > 0),
    status TEXT NOT NULL CHECK (status IN ('live', 'settled', 'released')), PRIMARY KEY (dfid, resource)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX one_live_reservation ON reservations (resource) WHERE status = 'live';

CREATE TABLE resources (
    resource TEXT PRIMARY KEY, epoch INTEGER NOT NULL, drawn INTEGER NOT NULL CHECK (drawn >= 0)
) STRICT, WITHOUT ROWID;

CREATE TABLE spend (
    dfid TEXT NOT NULL, scope TEXT NOT NULL, amount INTEGER NOT NULL, PRIMARY KEY (dfid, scope)
) STRICT, WITHOUT ROWID;

CREATE TABLE spend_totals (
    scope TEXT PRIMARY KEY, used INTEGER NOT NULL CHECK (used >= 0)
) STRICT, WITHOUT ROWID;

-- Since version 2, only by new tables: an older record gets them when it is opened.

-- registry: contracts withdrawn, and how many escalations an agent had left (in parts of 1/3,600,000) and when
CREATE TABLE contract_revocations (
    contract_hash TEXT PRIMARY KEY REFERENCES contracts, who TEXT NOT NULL, reason TEXT NOT NULL,
    revoked_at_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE escalation_budgets (
    agent_id TEXT PRIMARY KEY, parts INTEGER NOT NULL CHECK (parts >= 0), at_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TRIGGER revocation_no_update BEFORE UPDATE ON contract_revocations BEGIN
    SELECT RAISE(ABORT, 'a revocation is final: no update');
END;
CREATE TRIGGER revocation_no_delete BEFORE DELETE ON contract_revocations BEGIN
    SELECT RAISE(ABORT, 'a revocation is final: no delete');
END;

-- human decisions
CREATE TABLE human_decisions (
    dfid TEXT PRIMARY KEY, decision TEXT NOT NULL, who TEXT NOT NULL, reason TEXT NOT NULL, impact TEXT NOT NULL,
    acknowledged INTEGER NOT NULL, policy_kind TEXT, params TEXT, justification TEXT, proposal BLOB NOT NULL,
    seen TEXT NOT NULL, snapshot_id TEXT, snapshot TEXT, envelope_hash TEXT, envelope TEXT,
    contract_hash TEXT NOT NULL, lease_until_ms INTEGER NOT NULL, decided_at_ms INTEGER NOT NULL
) STRICT;

-- context store: session, memory, artifacts
CREATE INDEX proposals_by_agent ON policy_proposals (agent_id);
CREATE TABLE artifacts (
    name TEXT NOT NULL, version INTEGER NOT NULL, sha256 TEXT NOT NULL, text TEXT, ended_at_ms INTEGER,
    PRIMARY KEY (name, version)
) STRICT;
CREATE UNIQUE INDEX one_artifact_in_force ON artifacts (name) WHERE ended_at_ms IS NULL;

-- sagas: a parent flow in several steps, and what was undone of them (the dfid of a reversal is that of the step)

CREATE TABLE sagas (
    dfid TEXT PRIMARY KEY, name TEXT NOT NULL, steps TEXT NOT NULL, menu TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('STEPS', 'DIRTY', 'ENDED')), compensation TEXT
) STRICT;
CREATE INDEX sagas_open ON sagas (phase) WHERE phase <> 'ENDED';

CREATE TABLE saga_reversals (
    dfid TEXT PRIMARY KEY, saga TEXT NOT NULL REFERENCES sagas, idempotency_key TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL CHECK (status IN ('PENDING', 'REVERTED', 'REFUSED', 'UNKNOWN')), reference TEXT
) STRICT;

-- Since version 3

-- executors that do not answer (`kernel.breaker`); closed ones have no row
CREATE TABLE executor_breakers (
    gate TEXT PRIMARY KEY, failures INTEGER NOT NULL, opened_at_ms INTEGER, probe_at_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- checkpoints: heads of the ledger, each signed (Ed25519) over the entry, the checkpoint before and the time (version 3)
CREATE TABLE checkpoints (
    idx INTEGER PRIMARY KEY, entry_hash TEXT NOT NULL, prev_idx INTEGER NOT NULL, at_ms INTEGER NOT NULL,
    public_key TEXT NOT NULL, signature TEXT NOT NULL
) STRICT;

CREATE TRIGGER checkpoint_no_update BEFORE UPDATE ON checkpoints BEGIN
    SELECT RAISE(ABORT, 'a checkpoint is final: no update');
END;
CREATE TRIGGER checkpoint_no_delete BEFORE DELETE ON checkpoints BEGIN
    SELECT RAISE(ABORT, 'a checkpoint is final: no delete');
END;
CREATE TRIGGER checkpoint_next BEFORE INSERT ON checkpoints BEGIN
    SELECT RAISE(ABORT, 'a checkpoint is final: not after the last one')
    WHERE NEW.idx IS NULL OR NEW.idx <= (SELECT COALESCE(MAX(idx), 0) FROM checkpoints);
END;

-- privacy: the key of each case, wrapped under the kernel's, and of which cases it was destroyed
CREATE TABLE case_keys (
    gate TEXT NOT NULL, event_id TEXT NOT NULL, wrapped BLOB NOT NULL, PRIMARY KEY (gate, event_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE erasures (
    gate TEXT NOT NULL, event_id TEXT NOT NULL, who TEXT NOT NULL, reason TEXT NOT NULL, erased_at_ms INTEGER NOT NULL,
    PRIMARY KEY (gate, event_id)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER erasure_no_update BEFORE UPDATE ON erasures BEGIN
    SELECT RAISE(ABORT, 'an erasure is final: no update');
END;
CREATE TRIGGER erasure_no_delete BEFORE DELETE ON erasures BEGIN
    SELECT RAISE(ABORT, 'an erasure is final: no delete');
END;
CREATE TRIGGER case_key_no_update BEFORE UPDATE ON case_keys BEGIN
    SELECT RAISE(ABORT, 'a case has one key: no update');
END;
CREATE TRIGGER case_key_erased BEFORE INSERT ON case_keys
WHEN EXISTS (SELECT 1 FROM erasures e WHERE e.gate = NEW.gate AND e.event_id = NEW.event_id) BEGIN
    SELECT RAISE(ABORT, 'the texts of this case were erased: no key');
END;
CREATE TRIGGER case_key_kept BEFORE DELETE ON case_keys
WHEN NOT EXISTS (SELECT 1 FROM erasures e WHERE e.gate = OLD.gate AND e.event_id = OLD.event_id) BEGIN
    SELECT RAISE(ABORT, 'the key of a case is destroyed by an erasure: no delete');
END;

-- orders that were taken over from the outside: an unknown event may be that of one
CREATE INDEX flows_adopted ON decision_flows (gate) WHERE tag = 'ADOPTED';

-- clock: every ledger entry whose time is more than a minute before that of the last one, so that no window of a spend
-- limit opens anew; and what is asked of orders by time, and of the minutes of sliding windows

CREATE TABLE clock_steps (
    idx INTEGER PRIMARY KEY, was_ms INTEGER NOT NULL, now_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX orders_by_time ON execution_log (reserved_at_ms);
CREATE INDEX spend_by_minute ON spend (scope, amount) WHERE instr(scope, '/~/') > 0;

-- Since version 4

-- monitors (`kernel.registry.windows`): of each agent, running sums over its last decisions and labels; what these added to
-- windows of so many decisions, eight of them in a row; what the past sixtieths of windows of so many minutes held
CREATE TABLE monitor_windows (
    agent_id TEXT NOT NULL, stream TEXT NOT NULL, monitors TEXT NOT NULL,
    body TEXT NOT NULL, PRIMARY KEY (agent_id, stream)
) STRICT, WITHOUT ROWID;
CREATE TABLE monitor_entries (
    agent_id TEXT NOT NULL, stream TEXT NOT NULL, n INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (agent_id, stream, n)
) STRICT, WITHOUT ROWID;
CREATE TABLE monitor_buckets (
    agent_id TEXT NOT NULL, stream TEXT NOT NULL, monitor TEXT NOT NULL, bucket INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (agent_id, stream, monitor, bucket)
) STRICT, WITHOUT ROWID;

-- Since version 5

-- how often recovery has asked about an order that nobody knows the end of, and when it asks again (`operations.lookup_pauses`)
CREATE TABLE order_lookups (
    dfid TEXT PRIMARY KEY, asked INTEGER NOT NULL, due_at_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- until when a flow may be decided and its order sent, where whoever asked set a deadline; a human's decision knows none
CREATE TABLE flow_deadlines (dfid TEXT PRIMARY KEY, deadline_ms INTEGER NOT NULL) STRICT, WITHOUT ROWID;

-- Since version 6: pages of flows, the newest first
CREATE INDEX flows_by_opening ON decision_flows (created_at_ms, dfid);

-- Since version 7: the newest decisions of one key, however many it has; in the place of `snapshots_by_key`
CREATE INDEX snapshots_by_key_and_time ON context_snapshots (CASE WHEN json_valid(body) THEN body ->> '$.key' END, taken_at_ms);

-- Since version 8: what came of a flow, what is being undone, and what operators did (`ledger_acts`)
CREATE INDEX flows_by_parent ON decision_flows (parent_dfid) WHERE parent_dfid IS NOT NULL;
CREATE INDEX reversals_by_saga ON saga_reversals (saga);
CREATE INDEX reversals_open ON saga_reversals (status) WHERE status IN ('PENDING', 'UNKNOWN');

-- Since version 9: pages of orders, by when each ended; the cases about what the outside says; the cases that wait for a
-- human, by when their flows were opened, in the place of `flows_escalated`
CREATE INDEX orders_by_end ON execution_log (COALESCE(executed_at_ms, reserved_at_ms), dfid)
    WHERE status NOT IN ('PENDING', 'UNKNOWN');
CREATE INDEX flows_of_statement ON decision_flows (event_id) WHERE event_id >= 'statement/' AND event_id < 'statement0';
CREATE INDEX flows_waiting ON decision_flows (state, gate, created_at_ms, dfid) WHERE state = 'ESCALATED';

CREATE TABLE ledger (
    idx INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, kind TEXT NOT NULL, dfid TEXT NOT NULL, body TEXT NOT NULL,
    prev_hash TEXT NOT NULL, entry_hash TEXT NOT NULL
) STRICT;
CREATE INDEX ledger_by_dfid ON ledger (dfid);
CREATE UNIQUE INDEX one_decided ON ledger (dfid) WHERE kind = 'DECIDED';
CREATE INDEX ledger_acts ON ledger
    (kind, CASE WHEN json_valid(body) THEN COALESCE(body ->> '$.agent_id', body ->> '$.act') END, idx) WHERE dfid = '';

CREATE TRIGGER ledger_no_update BEFORE UPDATE ON ledger BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: no update');
END;
CREATE TRIGGER ledger_no_delete BEFORE DELETE ON ledger BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: no delete');
END;
CREATE TRIGGER ledger_next BEFORE INSERT ON ledger BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: not the next index')
    WHERE NEW.idx IS NULL OR NEW.idx <> (SELECT COALESCE(MAX(idx), 0) + 1 FROM ledger);
    SELECT RAISE(ABORT, 'the ledger is append-only: not chained to the last entry') WHERE NEW.prev_hash
    <> COALESCE((SELECT entry_hash FROM ledger ORDER BY idx DESC LIMIT 1), printf('%064d', 0));
    SELECT RAISE(ABORT, 'the ledger is append-only: this flow is decided')
    WHERE NEW.kind = 'DECIDED' AND EXISTS (SELECT 1 FROM ledger WHERE dfid = NEW.dfid AND kind = 'DECIDED');
END;
CREATE TRIGGER clock_was_set_back AFTER INSERT ON ledger
WHEN NEW.at_ms < (SELECT at_ms FROM ledger WHERE idx = NEW.idx - 1) - 60000 BEGIN
    INSERT INTO clock_steps SELECT NEW.idx, at_ms, NEW.at_ms FROM ledger WHERE idx = NEW.idx - 1;
END;
