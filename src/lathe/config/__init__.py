"""The configuration: parsing of overrides, composition, schema and checks. Imports no torch, so it answers at once."""
