-- The triggers of `schema.sql`, by the same names, in PostgreSQL's language. TRUNCATE, which SQLite has not, is refused, too.

CREATE OR REPLACE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
END
$$;

CREATE OR REPLACE FUNCTION {schema}.checkpoint_next() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.idx IS NULL OR NEW.idx <= (SELECT COALESCE(MAX(idx), 0) FROM {schema}.checkpoints) THEN
        RAISE EXCEPTION 'a checkpoint is final: not after the last one' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.case_key_erased() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM {schema}.erasures e WHERE e.gate = NEW.gate AND e.event_id = NEW.event_id) THEN
        RAISE EXCEPTION 'the texts of this case were erased: no key' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.case_key_kept() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM {schema}.erasures e WHERE e.gate = OLD.gate AND e.event_id = OLD.event_id) THEN
        RAISE EXCEPTION 'the key of a case is destroyed by an erasure: no delete'
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN OLD;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.ledger_next() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    last_idx bigint := 0;
    last_hash text := repeat('0', 64);
BEGIN
    SELECT idx, entry_hash INTO last_idx, last_hash FROM {schema}.ledger ORDER BY idx DESC LIMIT 1;
    IF NEW.idx IS DISTINCT FROM COALESCE(last_idx, 0) + 1 THEN
        RAISE EXCEPTION 'the ledger is append-only: not the next index' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    IF NEW.prev_hash IS DISTINCT FROM COALESCE(last_hash, repeat('0', 64)) THEN
        RAISE EXCEPTION 'the ledger is append-only: not chained to the last entry'
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    IF NEW.kind = 'DECIDED' AND EXISTS (SELECT 1 FROM {schema}.ledger WHERE dfid = NEW.dfid AND kind = 'DECIDED') THEN
        RAISE EXCEPTION 'the ledger is append-only: this flow is decided' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.clock_was_set_back() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {schema}.clock_steps SELECT NEW.idx, at_ms, NEW.at_ms FROM {schema}.ledger
    WHERE idx = NEW.idx - 1 AND NEW.at_ms < at_ms - 60000;
    RETURN NULL;
END
$$;

CREATE TRIGGER revocation_no_update BEFORE UPDATE OR TRUNCATE ON {schema}.contract_revocations
EXECUTE FUNCTION {schema}.refuse('a revocation is final: no update');

CREATE TRIGGER revocation_no_delete BEFORE DELETE ON {schema}.contract_revocations
EXECUTE FUNCTION {schema}.refuse('a revocation is final: no delete');

CREATE TRIGGER checkpoint_no_update BEFORE UPDATE OR TRUNCATE ON {schema}.checkpoints
EXECUTE FUNCTION {schema}.refuse('a checkpoint is final: no update');

CREATE TRIGGER checkpoint_no_delete BEFORE DELETE ON {schema}.checkpoints
EXECUTE FUNCTION {schema}.refuse('a checkpoint is final: no delete');

CREATE TRIGGER checkpoint_next BEFORE INSERT ON {schema}.checkpoints
FOR EACH ROW EXECUTE FUNCTION {schema}.checkpoint_next();

CREATE TRIGGER erasure_no_update BEFORE UPDATE OR TRUNCATE ON {schema}.erasures
EXECUTE FUNCTION {schema}.refuse('an erasure is final: no update');

CREATE TRIGGER erasure_no_delete BEFORE DELETE ON {schema}.erasures
EXECUTE FUNCTION {schema}.refuse('an erasure is final: no delete');

CREATE TRIGGER case_key_no_update BEFORE UPDATE OR TRUNCATE ON {schema}.case_keys
EXECUTE FUNCTION {schema}.refuse('a case has one key: no update');

CREATE TRIGGER case_key_erased BEFORE INSERT ON {schema}.case_keys
FOR EACH ROW EXECUTE FUNCTION {schema}.case_key_erased();

CREATE TRIGGER case_key_kept BEFORE DELETE ON {schema}.case_keys
FOR EACH ROW EXECUTE FUNCTION {schema}.case_key_kept();

CREATE TRIGGER ledger_no_update BEFORE UPDATE OR TRUNCATE ON {schema}.ledger
EXECUTE FUNCTION {schema}.refuse('the ledger is append-only: no update');

CREATE TRIGGER ledger_no_delete BEFORE DELETE ON {schema}.ledger
EXECUTE FUNCTION {schema}.refuse('the ledger is append-only: no delete');

CREATE TRIGGER ledger_next BEFORE INSERT ON {schema}.ledger
FOR EACH ROW EXECUTE FUNCTION {schema}.ledger_next();

CREATE TRIGGER clock_was_set_back AFTER INSERT ON {schema}.ledger
FOR EACH ROW EXECUTE FUNCTION {schema}.clock_was_set_back();
