-- JSON: properties of an adapter; NULL for models.
ALTER TABLE models ADD COLUMN adapter TEXT;
