-- The ledger of one run. The transactions are the state machine; `sqlite3 run.db` answers any question about a run.
--
-- episode  pending -> leased -> done
--                     leased -> pending        failed(kind) or expired and tried again; handed back
--                     leased -> given_up(kind) failed for good, or its group was cancelled
--          pending -> done | pending | given_up  late result of the same attempt
--          pending -> given_up(cancelled)      its group was cancelled
-- group    open -> ready -> closed             and, per trainable policy, in group_policy:
--          open -> ready -> kept | dropped(reason) | stale
--          kept -> batched | dropped(surplus) | stale
--          batched -> trained(version) | dropped(reason);  trained -> batched (undone) | dropped(rolled_back)
--          open -> stale                       cancelled early: nothing of it could be trained any more
-- sample   held -> trained | masked(reason) | dropped | stale;  trained, masked -> held (undone)
-- batch    cut -> issued -> committed | dropped(reason);  issued -> cut (failed, new trainer);  committed -> cut (undone)
-- eval     open -> done
--
-- Times are seconds on dataflow's logical clock. Every transition also leaves a row in events, which only grows.

CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  kind TEXT NOT NULL,
  group_id INTEGER,
  idx INTEGER,
  policy TEXT,
  batch INTEGER,
  data TEXT                                -- JSON object or NULL
);
CREATE INDEX IF NOT EXISTS events_by_group ON events (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_resumed ON events (policy) WHERE kind = 'resumed';
CREATE INDEX IF NOT EXISTS events_joined ON events (id) WHERE kind = 'joined';

CREATE TABLE IF NOT EXISTS policies (
  name TEXT PRIMARY KEY,
  trainable INTEGER NOT NULL,
  version INTEGER NOT NULL DEFAULT 0,      -- committed steps
  serial INTEGER NOT NULL DEFAULT 0,       -- of the newest publication
  trainer_epoch INTEGER NOT NULL DEFAULT 0,
  no_signal INTEGER NOT NULL DEFAULT 0,    -- batches in a row without a step
  barren INTEGER NOT NULL DEFAULT 0        -- groups in a row that were not kept
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS publications (
  policy TEXT NOT NULL,
  serial INTEGER NOT NULL,
  version INTEGER NOT NULL,
  digest TEXT NOT NULL,
  manifest BLOB NOT NULL,
  at REAL NOT NULL,
  PRIMARY KEY (policy, serial)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS publications_by_version ON publications (policy, version);

CREATE TABLE IF NOT EXISTS trainers (
  policy TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  incarnation TEXT NOT NULL,
  version INTEGER NOT NULL,                -- resumed at
  digest TEXT NOT NULL,
  trainer_epoch INTEGER NOT NULL,
  at REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS components (
  component TEXT NOT NULL,
  name TEXT NOT NULL,
  incarnation TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('alive', 'dead', 'left')),
  heard_at REAL NOT NULL,
  drain INTEGER NOT NULL DEFAULT 0,
  policies TEXT NOT NULL DEFAULT '',       -- a worker's, sorted, comma between
  supervised INTEGER NOT NULL DEFAULT 1,
  report BLOB,
  PRIMARY KEY (component, name)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS evals (
  id INTEGER PRIMARY KEY,
  policy TEXT NOT NULL,
  version INTEGER NOT NULL,
  digest TEXT NOT NULL,
  dataset TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'done')),
  episodes INTEGER NOT NULL,
  left_groups INTEGER NOT NULL,
  score REAL,
  coverage REAL,
  opened_at REAL NOT NULL,
  ended_at REAL,
  UNIQUE (policy, version, digest)
);

CREATE TABLE IF NOT EXISTS groups (
  id INTEGER PRIMARY KEY,
  purpose TEXT NOT NULL CHECK (purpose IN ('train', 'eval')),
  state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'closed')),
  size INTEGER NOT NULL,
  left_episodes INTEGER NOT NULL,          -- not yet ended
  supervised INTEGER NOT NULL,
  task BLOB NOT NULL,
  task_key TEXT NOT NULL,
  versions TEXT NOT NULL DEFAULT '{}',     -- pins: JSON object, policy to version
  eval_id INTEGER,
  arrival INTEGER,                         -- order of becoming ready
  opened_at REAL NOT NULL,
  ended_at REAL
);
CREATE INDEX IF NOT EXISTS groups_ready ON groups (arrival) WHERE state = 'ready';
CREATE INDEX IF NOT EXISTS groups_open ON groups (id) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS groups_eval ON groups (eval_id) WHERE eval_id IS NOT NULL;

CREATE TABLE IF NOT EXISTS version_choices ( -- of groups some of whose turns older versions sample
  group_id INTEGER PRIMARY KEY,
  chance REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS casts ( -- of groups opened when the roles were no longer played by whom the recipe says
  group_id INTEGER PRIMARY KEY,
  roles TEXT NOT NULL                      -- JSON object, role to policy
);

CREATE TABLE IF NOT EXISTS group_policy (
  group_id INTEGER NOT NULL,
  policy TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'kept', 'batched', 'trained', 'dropped', 'stale')),
  reason TEXT,
  arrival INTEGER,
  min_version INTEGER,                     -- oldest version of any sample; NULL: never stale
  fresh_version INTEGER,                   -- of its freshest sample: decides when nothing of it may be trained
  batch INTEGER,
  version INTEGER,                         -- trained: the version that its step made
  reward REAL,                             -- mean of what counts, for status
  verdict BLOB,                            -- float32 advantage per unit: as settled, and from the cut on as trained
  PRIMARY KEY (group_id, policy)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS group_policy_live ON group_policy (policy, state)
  WHERE state IN ('open', 'ready', 'kept', 'batched');
CREATE INDEX IF NOT EXISTS group_policy_kept ON group_policy (policy) WHERE state = 'kept';
CREATE INDEX IF NOT EXISTS group_policy_stored ON group_policy (policy, fresh_version) WHERE state = 'trained';
CREATE INDEX IF NOT EXISTS group_policy_batch ON group_policy (batch) WHERE batch IS NOT NULL;

CREATE TABLE IF NOT EXISTS episodes (
  group_id INTEGER NOT NULL,
  idx INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'done', 'given_up')),
  outcome TEXT,                            -- done: completed or truncated
  kind TEXT,                               -- given_up: the failure kind
  error TEXT,                              -- last failure
  lane INTEGER NOT NULL,                   -- 0 train, 1 eval
  supervised INTEGER NOT NULL,
  attempt INTEGER NOT NULL DEFAULT 0,
  submitted INTEGER NOT NULL DEFAULT 0,    -- newest attempt whose result was accepted
  failures INTEGER NOT NULL DEFAULT 0,
  user_failures INTEGER NOT NULL DEFAULT 0,
  worker TEXT,
  leased_at REAL,
  expires_at REAL,
  deadline_at REAL,
  leased_versions TEXT,                    -- newest versions at the lease: JSON object
  ended_at REAL,
  score REAL,
  samples INTEGER NOT NULL DEFAULT 0,      -- stored
  PRIMARY KEY (group_id, idx)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS episodes_pending ON episodes (lane, supervised, group_id, idx) WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS episodes_leased ON episodes (worker) WHERE state = 'leased';

CREATE TABLE IF NOT EXISTS payloads (
  id INTEGER PRIMARY KEY,
  group_id INTEGER NOT NULL,
  idx INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  file TEXT,                               -- SHA-256 of a file in payloads/, or NULL: body holds the episode
  body BLOB,
  UNIQUE (group_id, idx)
);

CREATE INDEX IF NOT EXISTS payloads_file ON payloads (file) WHERE file IS NOT NULL;

CREATE TABLE IF NOT EXISTS pruned_groups (  -- whose payloads are gone: nothing can ask for them again
  group_id INTEGER PRIMARY KEY,
  episodes INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  at REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS samples (
  group_id INTEGER NOT NULL,
  policy TEXT NOT NULL,
  idx INTEGER NOT NULL,
  agent TEXT NOT NULL,
  n INTEGER NOT NULL,                      -- id is group/idx/agent/n
  state TEXT NOT NULL CHECK (state IN ('held', 'trained', 'masked', 'dropped', 'stale')),
  mask TEXT,                               -- why it has no gradient; NULL: may be trained
  tokens INTEGER NOT NULL,
  min_version INTEGER,
  age INTEGER,                             -- at use
  PRIMARY KEY (group_id, policy, idx, agent, n)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS batches (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  policy TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('cut', 'issued', 'committed', 'dropped')),
  reason TEXT,
  version INTEGER NOT NULL,                -- that the step starts from
  trainer_epoch INTEGER NOT NULL DEFAULT 0,  -- issued to or committed by
  tokens INTEGER NOT NULL,
  sequences INTEGER NOT NULL,
  failures INTEGER NOT NULL DEFAULT 0,
  serial INTEGER,                          -- committed: of its publication
  base TEXT,                               -- committed: digest of the weights that its step started from
  file TEXT,
  rows INTEGER,                            -- bytes of its row in batch_rows; NULL once pruned or when in a file
  metrics TEXT,
  cut_at REAL NOT NULL,
  ended_at REAL
);
CREATE INDEX IF NOT EXISTS batches_live ON batches (policy, version, id) WHERE state IN ('cut', 'issued');
CREATE INDEX IF NOT EXISTS batches_done ON batches (policy, version) WHERE state = 'committed';
CREATE INDEX IF NOT EXISTS batches_stored ON batches (policy, state, version)
  WHERE (rows IS NOT NULL OR file IS NOT NULL);
CREATE INDEX IF NOT EXISTS batches_file ON batches (file) WHERE file IS NOT NULL;

CREATE TABLE IF NOT EXISTS batch_rows (     -- frozen at the cut; apart, as an UPDATE writes all of a row again
  batch INTEGER PRIMARY KEY,
  body BLOB NOT NULL
);

CREATE TABLE IF NOT EXISTS batch_groups (
  batch INTEGER NOT NULL,
  position INTEGER NOT NULL,
  group_id INTEGER NOT NULL,
  use INTEGER NOT NULL,                    -- 0 fresh, 1... replayed
  PRIMARY KEY (batch, position)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batch_groups_replayed ON batch_groups (group_id, use) WHERE use > 0;

CREATE TABLE IF NOT EXISTS algorithms (name TEXT PRIMARY KEY, state BLOB NOT NULL) WITHOUT ROWID;
