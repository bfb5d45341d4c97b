-- The tables of the stored conversations. Append only: a database is at version n once what stands
-- before the nth line "-- version" has run. ${START} begins a conversation, ${SPACE} is white space.

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    titled INTEGER NOT NULL DEFAULT 0,
    system TEXT NOT NULL DEFAULT '',
    settings TEXT NOT NULL DEFAULT '{}',
    created_s REAL NOT NULL,
    updated_s REAL NOT NULL,
    deleted_s REAL
);
CREATE TABLE messages (
    session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'done',
    stats TEXT,
    created_s REAL NOT NULL,
    PRIMARY KEY (session_id, seq)
) WITHOUT ROWID;
CREATE INDEX sessions_updated ON sessions(updated_s);
-- version
ALTER TABLE messages ADD COLUMN reasoning TEXT NOT NULL DEFAULT '';
ALTER TABLE messages ADD COLUMN seams TEXT;
-- thoughts stood in the text, between tags
UPDATE messages SET content = ltrim(content, ${SPACE})
    WHERE role = 'assistant' AND ltrim(content, ${SPACE}) GLOB '<think>*';
UPDATE messages SET
        reasoning = trim(substr(content, 8, instr(content, '</think>') - 8), ${SPACE}),
        content = ltrim(substr(content, instr(content, '</think>') + 8), char(10))
    WHERE role = 'assistant' AND content GLOB '<think>*</think>*';
UPDATE messages SET reasoning = ltrim(substr(content, 8), char(10)), content = ''
    WHERE role = 'assistant' AND content GLOB '<think>*';
-- version
-- versions: the message that each follows, and where the chosen path ends
ALTER TABLE messages ADD COLUMN parent INTEGER NOT NULL DEFAULT ${START};
ALTER TABLE sessions ADD COLUMN leaf INTEGER NOT NULL DEFAULT ${START};
UPDATE messages SET parent = coalesce(
    (SELECT max(seq) FROM messages AS earlier
     WHERE earlier.session_id = messages.session_id AND earlier.seq < messages.seq),
    ${START});
UPDATE sessions SET leaf = coalesce(
    (SELECT max(seq) FROM messages WHERE session_id = id), ${START});
-- version
-- which words stand where was known of a session as it was then
ALTER TABLE sessions ADD COLUMN indexed_s REAL;
CREATE TABLE indexed (
    number INTEGER PRIMARY KEY,
    session_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    UNIQUE (session_id, seq)
);
-- version
DROP TABLE indexed;
