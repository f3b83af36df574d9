-- How many rows are in which state, kept by the connection that writes them: a status costs the same at any length of a run.
-- Temporary, so that they are told anew from the rows at every start, and go back with a transaction that does.
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE IF NOT EXISTS state_counts (
  what TEXT NOT NULL,                      -- episodes, groups (of a policy) or ages (of trained samples)
  policy TEXT NOT NULL,
  state TEXT NOT NULL,                     -- of ages: how many versions
  reason TEXT NOT NULL,
  n INTEGER NOT NULL,
  PRIMARY KEY (what, policy, state, reason)
) WITHOUT ROWID;
DELETE FROM state_counts;

INSERT INTO state_counts SELECT 'episodes', '', state, '', COUNT(*) FROM episodes GROUP BY state;
INSERT INTO state_counts
  SELECT 'groups', policy, state, IFNULL(reason, ''), COUNT(*) FROM group_policy GROUP BY policy, state, IFNULL(reason, '');
INSERT INTO state_counts
  SELECT 'ages', policy, age, '', COUNT(*) FROM samples WHERE state = 'trained' AND age IS NOT NULL GROUP BY policy, age;

CREATE TEMP TRIGGER IF NOT EXISTS episode_came AFTER INSERT ON main.episodes BEGIN
  INSERT INTO state_counts VALUES ('episodes', '', NEW.state, '', 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TEMP TRIGGER IF NOT EXISTS episode_moved AFTER UPDATE OF state ON main.episodes WHEN OLD.state <> NEW.state BEGIN
  UPDATE state_counts SET n = n - 1 WHERE what = 'episodes' AND policy = '' AND state = OLD.state AND reason = '';
  INSERT INTO state_counts VALUES ('episodes', '', NEW.state, '', 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TEMP TRIGGER IF NOT EXISTS episode_went AFTER DELETE ON main.episodes BEGIN
  UPDATE state_counts SET n = n - 1 WHERE what = 'episodes' AND policy = '' AND state = OLD.state AND reason = '';
END;

CREATE TEMP TRIGGER IF NOT EXISTS group_came AFTER INSERT ON main.group_policy BEGIN
  INSERT INTO state_counts VALUES ('groups', NEW.policy, NEW.state, IFNULL(NEW.reason, ''), 1)
    ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TEMP TRIGGER IF NOT EXISTS group_moved AFTER UPDATE OF state, reason ON main.group_policy
  WHEN OLD.state <> NEW.state OR OLD.reason IS NOT NEW.reason BEGIN
  UPDATE state_counts SET n = n - 1
    WHERE what = 'groups' AND policy = OLD.policy AND state = OLD.state AND reason = IFNULL(OLD.reason, '');
  INSERT INTO state_counts VALUES ('groups', NEW.policy, NEW.state, IFNULL(NEW.reason, ''), 1)
    ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TEMP TRIGGER IF NOT EXISTS group_went AFTER DELETE ON main.group_policy BEGIN
  UPDATE state_counts SET n = n - 1
    WHERE what = 'groups' AND policy = OLD.policy AND state = OLD.state AND reason = IFNULL(OLD.reason, '');
END;

CREATE TEMP TRIGGER IF NOT EXISTS sample_came AFTER INSERT ON main.samples WHEN NEW.state = 'trained' AND NEW.age IS NOT NULL BEGIN
  INSERT INTO state_counts VALUES ('ages', NEW.policy, NEW.age, '', 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TEMP TRIGGER IF NOT EXISTS sample_left AFTER UPDATE OF state, age ON main.samples
  WHEN OLD.state = 'trained' AND OLD.age IS NOT NULL BEGIN
  UPDATE state_counts SET n = n - 1 WHERE what = 'ages' AND policy = OLD.policy AND state = OLD.age AND reason = '';
END;
CREATE TEMP TRIGGER IF NOT EXISTS sample_trained AFTER UPDATE OF state, age ON main.samples
  WHEN NEW.state = 'trained' AND NEW.age IS NOT NULL BEGIN
  INSERT INTO state_counts VALUES ('ages', NEW.policy, NEW.age, '', 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TEMP TRIGGER IF NOT EXISTS sample_went AFTER DELETE ON main.samples WHEN OLD.state = 'trained' AND OLD.age IS NOT NULL BEGIN
  UPDATE state_counts SET n = n - 1 WHERE what = 'ages' AND policy = OLD.policy AND state = OLD.age AND reason = '';
END;
