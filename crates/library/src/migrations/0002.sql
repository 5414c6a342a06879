-- Whether this version of the program can run a model, and of what that was learned.
ALTER TABLE models ADD COLUMN problem TEXT;
ALTER TABLE models ADD COLUMN inspected_by TEXT NOT NULL DEFAULT '';
ALTER TABLE models ADD COLUMN stamp TEXT NOT NULL DEFAULT '';
-- JSON: settings of a model that outlive its files, such as presets and aliases.
ALTER TABLE models ADD COLUMN extra TEXT NOT NULL DEFAULT '{}';
