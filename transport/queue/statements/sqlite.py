"""Tables of a queue in an SQLite file, and the statements that move its deliveries."""

# `open` counts a ticket's unfinished deliveries; at 0 its bytes go, unless one is dead; the row remains as a memory.
# Tokens are (seq, attempts): seq is never used twice, and attempts grow with every claim, which fences older claims.
SCHEMA = """
CREATE TABLE tickets (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, data BLOB, policy_version INTEGER,
    open INTEGER NOT NULL);
CREATE INDEX tickets_finished ON tickets (seq) WHERE open = 0;
CREATE TABLE deliveries (
    seq INTEGER NOT NULL REFERENCES tickets ON DELETE CASCADE, rank INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'ready', attempts INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0, lease_ends REAL, consumer TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '', PRIMARY KEY (seq, rank)) WITHOUT ROWID;
CREATE INDEX deliveries_ready ON deliveries (rank, seq, not_before) WHERE state = 'ready';
CREATE INDEX deliveries_leased ON deliveries (lease_ends) WHERE lease_ends IS NOT NULL;
CREATE INDEX deliveries_failed ON deliveries (seq) WHERE state IN ('discarded', 'dead', 'lost');
CREATE TABLE counts (rank INTEGER, name TEXT, amount INTEGER NOT NULL, PRIMARY KEY (rank, name)) WITHOUT ROWID;
CREATE TABLE notices (topic TEXT PRIMARY KEY, version INTEGER NOT NULL, payload BLOB NOT NULL) WITHOUT ROWID;
"""

# After a reboot all claimants have ended, and times of the old boot are invalid.
ON_REBOOT = """
UPDATE deliveries SET lease_ends = 0 WHERE lease_ends IS NOT NULL;
UPDATE deliveries SET not_before = 0 WHERE state = 'ready' AND not_before > 0;
"""

# One statement moves any number of deliveries: each statement costs more than a row, and lets other threads in between.
# Deliveries are passed as JSON, [[seq, rank, attempts], …].
PUBLISH = "INSERT INTO tickets (id, data, policy_version, open) VALUES {} ON CONFLICT (id) DO NOTHING"
LAST_SEQ = "SELECT COALESCE(MAX(seq), 0) FROM tickets"
DELIVER = "INSERT INTO deliveries (seq, rank) SELECT seq, ? FROM tickets WHERE seq > ?"
ENDED = "SELECT seq, rank, attempts, state FROM deliveries WHERE lease_ends <= ?"
END_LEASE = """
UPDATE deliveries SET lease_ends = NULL, reason = 'the lease of ' || consumer || ' ended', state = ?
WHERE seq = ? AND rank = ?"""
ANYTHING_DUE = """
SELECT EXISTS (SELECT 1 FROM deliveries WHERE rank = :rank AND state = 'ready' AND not_before <= :now)
    OR EXISTS (SELECT 1 FROM deliveries WHERE lease_ends <= :now)"""
NEXT_DUE = "SELECT MIN(not_before) FROM deliveries WHERE rank = ? AND state = 'ready'"
OLDEST_READY = """
SELECT seq, id, data, attempts, policy_version FROM deliveries JOIN tickets USING (seq)
WHERE rank = ? AND state = 'ready' AND not_before <= ? ORDER BY seq LIMIT ?"""
UNFINISHED = "SELECT data FROM tickets WHERE open > 0 AND data IS NOT NULL ORDER BY seq DESC LIMIT ?"
CLAIM = """
UPDATE deliveries SET state = 'claimed', attempts = attempts + 1, lease_ends = ?, consumer = ?
WHERE rank = ? AND seq IN (SELECT value FROM json_each(?))"""
HELD = """
FROM (SELECT json_extract(value, '$[0]') AS seq, json_extract(value, '$[1]') AS rank,
             json_extract(value, '$[2]') AS attempts FROM json_each(?)) AS held
WHERE deliveries.seq = held.seq AND deliveries.rank = held.rank AND deliveries.attempts = held.attempts"""
MOVE = f"""
UPDATE deliveries SET state = ?, reason = ?, not_before = ?, lease_ends = NULL {HELD} AND state = ?
RETURNING seq, rank, attempts"""
ARRIVE = f"UPDATE deliveries SET state = 'arrived' {HELD} AND state = 'claimed' RETURNING seq, rank, attempts"
RENEW = f"UPDATE deliveries SET lease_ends = ? {HELD} AND lease_ends IS NOT NULL RETURNING seq, rank, attempts"
CLOSE = """
UPDATE tickets SET open = open - ended.amount, data = CASE WHEN open = ended.amount AND NOT EXISTS (
    SELECT 1 FROM deliveries WHERE deliveries.seq = tickets.seq AND state = 'dead') THEN NULL ELSE data END
FROM (SELECT value AS seq, COUNT(*) AS amount FROM json_each(?) GROUP BY value) AS ended
WHERE tickets.seq = ended.seq"""
DEAD = """
SELECT seq, rank FROM deliveries JOIN tickets USING (seq)
WHERE state = 'dead' AND data IS NOT NULL ORDER BY seq, rank LIMIT ?"""
REQUEUE = "UPDATE deliveries SET state = 'ready', not_before = 0 WHERE seq = ? AND rank = ?"
DISCARD_AGED = "UPDATE deliveries SET state = 'discarded', consumer = ?, reason = ? WHERE seq = ? AND rank = ?"
COUNT = "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET amount = amount + excluded.amount"
PURGE = """
DELETE FROM tickets WHERE open = 0
    AND seq <= (SELECT seq FROM tickets WHERE open = 0 ORDER BY seq DESC LIMIT 1 OFFSET ?)"""
