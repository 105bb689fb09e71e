"""The plan: model + cluster + job + layout + knobs, its file, and overriding one field."""
