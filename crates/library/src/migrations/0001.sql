-- A model, by its name. Two names of one content are two rows; the blobs are shared.
CREATE TABLE models (
    id INTEGER PRIMARY KEY,
    base TEXT NOT NULL COLLATE NOCASE,
    tag TEXT NOT NULL COLLATE NOCASE,
    source TEXT NOT NULL,               -- JSON
    format TEXT NOT NULL,               -- 'gguf', 'safetensors'
    architecture TEXT,
    parameter_count INTEGER NOT NULL,
    quantization TEXT NOT NULL,
    parameters TEXT NOT NULL,           -- JSON: defaults of requests
    created_at INTEGER NOT NULL,        -- milliseconds since 1970
    modified_at INTEGER NOT NULL,
    UNIQUE (base, tag)
) STRICT;

CREATE TABLE files (
    model INTEGER NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    size INTEGER NOT NULL,
    digest TEXT NOT NULL,               -- SHA-256, 64 hexadecimal digits
    location TEXT,                      -- NULL: a blob of the library; otherwise a path outside of it
    PRIMARY KEY (model, position),
    UNIQUE (model, name)
) STRICT, WITHOUT ROWID;
