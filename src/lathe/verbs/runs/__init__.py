"""List, filter, compare, tag, archive and delete runs. Imports no torch."""
