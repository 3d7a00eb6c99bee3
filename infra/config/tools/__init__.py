"""What works on any configuration: base class, overrides given as text, schema, allowed changes, grids of variants."""
